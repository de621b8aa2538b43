// What the stand-in refuses, and what it sees: without these a program that breaks CUDA's rules
// would pass. (What it does right, the library's own tests show.) Each test is a process, so that
// it begins with a fresh driver.
#include <dlfcn.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "exports.h"
#include "test_kernels.h"
#include "tests/check.h"

namespace {

namespace kernels = pycollective::cuda::testing;

#define EXPECT(code, ...)                                                                     \
  do {                                                                                        \
    const CUresult got_ = (__VA_ARGS__);                                                      \
    if (got_ != (code)) {                                                                     \
      std::fprintf(stderr, "%s:%d: %s: %d, not %s\n", __FILE__, __LINE__, #__VA_ARGS__, got_, \
                   #code);                                                                    \
      std::abort();                                                                           \
    }                                                                                         \
  } while (false)
#define OK(...) EXPECT(CUDA_SUCCESS, __VA_ARGS__)

struct Driver {
#define MEMBER(base, since, exported) decltype(&::exported) base = nullptr;
  STANDIN_FUNCTIONS(MEMBER)
#undef MEMBER
};

Driver load() {
  void* const library = dlopen(std::getenv("PYCOLLECTIVE_CUDA_DRIVER"), RTLD_NOW | RTLD_LOCAL);
  if (!library) std::fprintf(stderr, "%s\n", dlerror());
  CHECK(library);
  Driver driver;
#define FETCH(base, since, exported) \
  driver.base = reinterpret_cast<decltype(driver.base)>(dlsym(library, #exported));
  STANDIN_FUNCTIONS(FETCH)
#undef FETCH
  return driver;
}

const Driver& cu() {
  static const Driver driver = load();
  return driver;
}

// A process of this program that runs what is registered under the name, with a socket.
struct Process {
  pid_t pid = -1;
  int socket = -1;
  int errors = -1;  // its stderr

  explicit Process(const char* name) {
    int pair[2], text[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0 && pipe(text) == 0);
    pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
      dup2(pair[1], 3);
      dup2(text[1], 2);
      close(text[0]);
      execl("/proc/self/exe", "test", name, static_cast<char*>(nullptr));
      _exit(127);
    }
    close(pair[1]);
    close(text[1]);
    socket = pair[0];
    errors = text[0];
  }
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;
  ~Process() {
    close(socket);
    close(errors);
  }
  // What it wrote to stderr, and how it ended, as waitpid() has it.
  std::pair<std::string, int> end() const {
    std::string text;
    char part[4096];
    for (ssize_t got; (got = read(errors, part, sizeof part)) > 0;)
      text.append(part, static_cast<std::size_t>(got));
    int status = 0;
    CHECK(waitpid(pid, &status, 0) == pid);
    return {text, status};
  }
};

// To and from the other side of a Process, whose own socket is 3.
template <class T>
void send(int socket, const T& value) {
  CHECK(write(socket, &value, sizeof value) == sizeof value);
}
template <class T>
T receive(int socket) {
  T value;
  CHECK(recv(socket, &value, sizeof value, MSG_WAITALL) == sizeof value);
  return value;
}

struct Named {
  const char* name;
  void (*body)();
  bool test;  // not a part that a test starts
};
std::vector<Named>& all_named() {
  static std::vector<Named> all;
  return all;
}
#define NAMED(name, is_test)                                                       \
  void name();                                                                     \
  const bool name##_added = (all_named().push_back({#name, name, is_test}), true); \
  void name()
#define TEST(name) NAMED(name, true)
#define PART(name) NAMED(name, false)  // of a test, in another process

bool ended_well(int status) { return WIFEXITED(status) && WEXITSTATUS(status) == 0; }
bool faulted(int status) {
  return WIFSIGNALED(status) && (WTERMSIG(status) == SIGSEGV || WTERMSIG(status) == SIGBUS);
}

// Fails where the part does not end by itself, or does not say this.
void run_part(const char* name, const char* says) {
  const auto [text, status] = Process(name).end();
  if (!ended_well(status) || text.find(says) == std::string::npos)
    std::fprintf(stderr, "%s: status %d\n%s", name, status, text.c_str());
  CHECK(ended_well(status) && text.find(says) != std::string::npos);
}

// What most tests begin with: a context that is current, and the test kernels.
struct Session {
  explicit Session(int device = 0) {
    OK(cu().cuInit(0));
    OK(cu().cuDevicePrimaryCtxRetain(&context, device));
    OK(cu().cuCtxPushCurrent(context));
    OK(cu().cuModuleLoadDataEx(&module, "// PTX", 0, nullptr, nullptr));
  }
  CUfunction function(const char* name) const {
    CUfunction found = nullptr;
    OK(cu().cuModuleGetFunction(&found, module, name));
    return found;
  }
  CUcontext context = nullptr;
  CUmodule module = nullptr;
};

CUdeviceptr device_words(std::size_t words) {
  CUdeviceptr address = 0;
  OK(cu().cuMemAlloc(&address, 4 * words));
  return address;
}

CUstream new_stream(unsigned flags = CU_STREAM_NON_BLOCKING) {
  CUstream stream = nullptr;
  OK(cu().cuStreamCreate(&stream, flags));
  return stream;
}

CUevent new_event() {
  CUevent event = nullptr;
  OK(cu().cuEventCreate(&event, 0));
  return event;
}

std::uint32_t* at(CUdeviceptr address) { return reinterpret_cast<std::uint32_t*>(address); }
CUdeviceptr number(const void* pointer) { return reinterpret_cast<CUdeviceptr>(pointer); }

template <class Parameters>
CUresult launch(CUfunction function, Parameters parameters, unsigned blocks, unsigned threads,
                CUstream stream) {
  void* all[] = {&parameters};
  return cu().cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, 0, stream, all, nullptr);
}

std::uint32_t first_word(CUdeviceptr from, CUstream stream) {
  std::uint32_t word = 0;
  OK(cu().cuMemcpyAsync(number(&word), from, 4, stream));
  OK(cu().cuStreamSynchronize(stream));
  return word;
}

// Holds back a stream until the host opens it.
struct Gate {
  explicit Gate(const Session& session) : wait(session.function("test_wait")) {
    void* host = nullptr;
    OK(cu().cuMemHostAlloc(&host, 4, 0));
    word = static_cast<std::uint32_t*>(host);
    *word = 0;
    OK(cu().cuMemHostGetDevicePointer(&address, host, 0));
  }
  void hold(CUstream stream) const {
    OK(launch(wait, kernels::Wait{at(address), 1, nullptr}, 1, 1, stream));
  }
  void open() const { __atomic_store_n(word, 1, __ATOMIC_RELEASE); }
  CUfunction wait;
  std::uint32_t* word = nullptr;
  CUdeviceptr address = 0;
};

// Long enough that what wrongly does not wait has gone on.
void let_others_go_on() { std::this_thread::sleep_for(std::chrono::milliseconds(50)); }

bool idle(CUstream stream) {
  const CUresult result = cu().cuStreamQuery(stream);
  CHECK(result == CUDA_SUCCESS || result == CUDA_ERROR_NOT_READY);
  return result == CUDA_SUCCESS;
}

// Nothing here takes long; what hangs shall be seen to.
void wait_for(CUstream stream) {
  for (int i = 0; i < 20'000 && !idle(stream); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  CHECK(idle(stream));
}

// A memset on the stream.
void work(CUstream stream) {
  static const CUdeviceptr word = device_words(1);
  OK(cu().cuMemsetD32Async(word, 1, 1, stream));
}

TEST(things_of_another_context_are_refused) {
  const Session first(0);
  const CUstream stream = new_stream();
  const CUevent event = new_event();
  const CUdeviceptr address = device_words(64);
  const CUfunction copy = first.function("test_copy");
  const Session second(1);
  const CUstream own = new_stream();
  CUfunction found = nullptr;
  EXPECT(CUDA_ERROR_INVALID_HANDLE, cu().cuStreamQuery(stream));
  EXPECT(CUDA_ERROR_INVALID_HANDLE, cu().cuEventRecord(event, own));
  EXPECT(CUDA_ERROR_INVALID_HANDLE, cu().cuEventQuery(event));
  EXPECT(CUDA_ERROR_INVALID_HANDLE, cu().cuModuleGetFunction(&found, first.module, "test_copy"));
  EXPECT(CUDA_ERROR_INVALID_HANDLE, launch(copy, kernels::Copy{}, 1, 1, own));
  EXPECT(CUDA_ERROR_INVALID_CONTEXT, cu().cuMemFree(address));
  EXPECT(CUDA_ERROR_INVALID_CONTEXT, cu().cuMemsetD32Async(address, 0, 1, own));
  OK(cu().cuStreamWaitEvent(own, event, 0));  // the one that may be another context's
}

// Kernels that are given what they may not touch, by how the error is told.
void touches(const std::uint32_t* from) {
  const Session own(1);
  const CUstream stream = new_stream();
  OK(launch(own.function("test_copy"), kernels::Copy{from, at(device_words(64)), 64}, 1, 64,
            stream));
  EXPECT(CUDA_ERROR_ILLEGAL_ADDRESS, cu().cuStreamSynchronize(stream));
  CUdeviceptr address;  // sticky: of every later call
  EXPECT(CUDA_ERROR_ILLEGAL_ADDRESS, cu().cuMemAlloc(&address, 4));
}
PART(kernel_reaches_without_access) {
  const Session first(0);
  touches(at(device_words(64)));
}
PART(kernel_reads_freed_memory) {
  const Session own(1);
  const CUdeviceptr freed = device_words(64);
  OK(cu().cuMemFree(freed));
  EXPECT(CUDA_ERROR_INVALID_VALUE, cu().cuMemFree(freed));
  EXPECT(CUDA_ERROR_INVALID_VALUE, cu().cuMemsetD32Async(freed, 0, 1, nullptr));
  touches(at(freed));
}
PART(kernel_gets_host_pointer) {
  const Session own(1);
  void* pinned = nullptr;
  OK(cu().cuMemHostAlloc(&pinned, 256, 0));
  touches(static_cast<std::uint32_t*>(pinned));  // which is no device's pointer
}
TEST(a_kernel_may_touch_its_devices_memory_alone) {
  run_part("kernel_reaches_without_access", "no access");
  run_part("kernel_reads_freed_memory", "kernel `test_copy`");
  run_part("kernel_gets_host_pointer", "the host's");
}

PART(host_reads_device_memory) {
  const Session session;
  const CUdeviceptr address = device_words(16);
  CHECK(first_word(address, nullptr) == 0xffffffff);  // a NaN in every type
  send(3, 1);
  const volatile std::uint32_t* const word = at(address);
  send(3, std::uint32_t{*word});
}
TEST(host_access_faults) {
  const Process process("host_reads_device_memory");
  CHECK(receive<int>(process.socket) == 1);
  CHECK(faulted(process.end().second));
}

TEST(copies_refuse_the_wrong_kind) {
  const Session session;
  const CUstream stream = new_stream();
  const CUdeviceptr device = device_words(64);
  std::uint32_t host[64] = {};
  void* pinned = nullptr;
  OK(cu().cuMemHostAlloc(&pinned, 256, 0));
  CUdeviceptr mapped = 0;
  OK(cu().cuMemHostGetDevicePointer(&mapped, pinned, 0));
  CHECK(at(mapped) != pinned);
  EXPECT(CUDA_ERROR_INVALID_VALUE, cu().cuMemsetD32Async(number(host), 0, 1, stream));
  EXPECT(CUDA_ERROR_INVALID_VALUE, cu().cuMemcpyAsync(device, device + 252, 8, stream));
  EXPECT(CUDA_ERROR_INVALID_VALUE, cu().cuMemsetD32Async(device, 0, 65, stream));
  EXPECT(CUDA_ERROR_INVALID_VALUE, cu().cuMemsetD32Async(device + 2, 0, 1, stream));
  // Where kernels see device memory is no address for a program, either.
  const CUdeviceptr alias = device + (number(pinned) - mapped);
  EXPECT(CUDA_ERROR_INVALID_VALUE, cu().cuMemcpyAsync(device, alias, 4, stream));
}

PART(writes_past_the_end) {
  const Session session;
  const CUdeviceptr address = device_words(10);
  OK(launch(session.function("test_writes_past"), kernels::Copy{nullptr, at(address), 10}, 1, 1,
            nullptr));
  OK(cu().cuStreamSynchronize(nullptr));
  EXPECT(CUDA_ERROR_ILLEGAL_ADDRESS, cu().cuMemFree(address));
}
PART(writes_far_past_the_end) {
  const Session session;
  OK(launch(session.function("test_writes_past"),
            kernels::Copy{nullptr, at(device_words(10)), 4096}, 1, 1, nullptr));
  OK(cu().cuStreamSynchronize(nullptr));
}
TEST(a_write_past_the_end_is_found) {
  const auto [near, near_status] = Process("writes_past_the_end").end();
  const auto [far, far_status] = Process("writes_far_past_the_end").end();
  CHECK(faulted(far_status));
#if defined(__SANITIZE_ADDRESS__)
  CHECK(!ended_well(near_status) && near.find("use-after-poison") != std::string::npos);
#else
  CHECK(ended_well(near_status) && near.find("past its end") != std::string::npos);
  const char* const fault = "kernel `test_writes_past`, block 0, thread 0: fault";
  CHECK(far.find(fault) != std::string::npos);
#endif
}

void misses_a_barrier(const char* kernel) {
  const Session session;
  const CUstream stream = new_stream();
  OK(launch(session.function(kernel), kernels::Copy{}, 1, 8, stream));
  EXPECT(CUDA_ERROR_LAUNCH_FAILED, cu().cuStreamSynchronize(stream));
  EXPECT(CUDA_ERROR_LAUNCH_FAILED, launch(nullptr, kernels::Copy{}, 1, 8, stream));
}
PART(one_leaves) { misses_a_barrier("test_one_leaves"); }
PART(two_barriers) { misses_a_barrier("test_two_barriers"); }
TEST(a_barrier_that_some_miss_is_an_error_by_name) {
  run_part("one_leaves", "kernel `test_one_leaves`");
  run_part("one_leaves", "barrier() (line ");
  run_part("two_barriers", "barrier_or() (line ");
}

// Sixteen blocks of 64 are all that a device holds: one that waits for another waits for ever.
TEST(blocks_that_wait_must_fit_the_device) {
  const Session session;
  const CUfunction wait = session.function("test_wait"), copy = session.function("test_copy");
  const Gate gate(session), waiting(session);
  const CUstream full = new_stream(), other = new_stream();
  const CUdeviceptr from = device_words(64), to = device_words(64);
  OK(launch(wait, kernels::Wait{at(gate.address), 1, at(waiting.address)}, 16, 64, full));
  while (__atomic_load_n(waiting.word, __ATOMIC_ACQUIRE) < 16) std::this_thread::yield();
  OK(launch(copy, kernels::Copy{at(from), at(to), 64}, 1, 64, other));
  let_others_go_on();
  EXPECT(CUDA_ERROR_NOT_READY, cu().cuStreamQuery(other));
  gate.open();
  OK(cu().cuStreamSynchronize(other));
}

TEST(streams_that_nothing_orders_do_not_wait) {
  const Session session;
  const Gate gate(session), other(session), third(session);
  const CUstream stream = new_stream();
  const CUstream first = new_stream(CU_STREAM_DEFAULT), second = new_stream(CU_STREAM_DEFAULT);
  gate.hold(stream);
  work(nullptr);
  wait_for(nullptr);
  CHECK(!idle(stream));
  other.hold(nullptr);
  gate.open();
  work(stream);
  wait_for(stream);
  CHECK(!idle(nullptr));
  other.open();
  third.hold(first);
  work(second);
  wait_for(second);
  CHECK(!idle(first));
  third.open();
  wait_for(first);
}

TEST(a_wait_binds_to_the_record_before_it) {
  const Session session;
  const Gate gate(session), own(session);
  const CUstream first = new_stream(), second = new_stream(), third = new_stream();
  const CUevent event = new_event();
  OK(cu().cuStreamWaitEvent(second, event, 0));  // never recorded: nothing to wait for
  wait_for(second);
  OK(cu().cuEventRecord(event, first));
  wait_for(first);
  own.hold(second);
  OK(cu().cuStreamWaitEvent(second, event, 0));  // of the record that is reached
  gate.hold(first);
  OK(cu().cuEventRecord(event, first));
  EXPECT(CUDA_ERROR_NOT_READY, cu().cuEventQuery(event));
  own.open();
  wait_for(second);
  OK(cu().cuStreamWaitEvent(third, event, 0));  // of the one that is not
  work(third);
  let_others_go_on();
  CHECK(!idle(third) && !idle(first));
  gate.open();
  wait_for(third);
}

// Calls that wait for the device to drain: here always, so that one beside a kernel that spins is
// found out.
TEST(freeing_and_loading_wait_for_the_device) {
  const Session session;
  const CUstream stream = new_stream();
  void* pinned = nullptr;
  OK(cu().cuMemHostAlloc(&pinned, 4, 0));
  void (*const calls[])(const Session&, CUdeviceptr, void*) = {
      [](const Session&, CUdeviceptr word, void*) { OK(cu().cuMemFree(word)); },
      [](const Session&, CUdeviceptr, void* host) { OK(cu().cuMemFreeHost(host)); },
      [](const Session& its, CUdeviceptr, void*) { its.function("test_writes_past"); },
      [](const Session&, CUdeviceptr, void*) { const Session again; }};
  const CUdeviceptr word = device_words(1);
  for (const auto& call : calls) {
    const Gate gate(session);
    gate.hold(stream);
    std::atomic<bool> back{false};
    std::thread waits([&] {
      OK(cu().cuCtxPushCurrent(session.context));
      call(session, word, pinned);
      back = true;
    });
    let_others_go_on();
    CHECK(!back);
    gate.open();
    waits.join();
    CHECK(idle(stream));
  }
}

void begin(CUstream stream, CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL) {
  OK(cu().cuStreamBeginCapture(stream, mode));
}

CUgraphExec end(CUstream stream) {
  CUgraph graph = nullptr;
  OK(cu().cuStreamEndCapture(stream, &graph));
  CUgraphExec executable = nullptr;
  OK(cu().cuGraphInstantiateWithFlags(&executable, graph, 0));
  OK(cu().cuGraphDestroy(graph));
  return executable;
}

// The capture on the stream was spoiled: it says so until it is ended, and gives no graph.
void expect_spoiled(CUstream stream) {
  CUstreamCaptureStatus status;
  OK(cu().cuStreamIsCapturing(stream, &status));
  CHECK(status == CU_STREAM_CAPTURE_STATUS_INVALIDATED);
  CUgraph graph = reinterpret_cast<CUgraph>(1);
  EXPECT(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, cu().cuStreamEndCapture(stream, &graph));
  OK(cu().cuStreamIsCapturing(stream, &status));
  CHECK(!graph && status == CU_STREAM_CAPTURE_STATUS_NONE);
}

TEST(what_is_unsafe_spoils_a_capture) {
  const Session session;
  const CUstream stream = new_stream(), other = new_stream();
  const CUevent event = new_event();
  OK(cu().cuEventRecord(event, other));
  OK(cu().cuStreamSynchronize(other));
  const auto each = [&](auto call) {
    for (const CUstreamCaptureMode mode :
         {CU_STREAM_CAPTURE_MODE_GLOBAL, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
          CU_STREAM_CAPTURE_MODE_RELAXED})
      for (const bool elsewhere : {false, true}) {
        begin(stream, mode);
        CUresult result = CUDA_SUCCESS;
        if (elsewhere)
          std::thread([&] {
            OK(cu().cuCtxPushCurrent(session.context));
            result = call();
          }).join();
        else
          result = call();
        const bool spoils = mode == CU_STREAM_CAPTURE_MODE_GLOBAL ||
                            (mode == CU_STREAM_CAPTURE_MODE_THREAD_LOCAL && !elsewhere);
        EXPECT(spoils ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS, result);
        if (spoils)
          expect_spoiled(stream);
        else
          OK(cu().cuGraphExecDestroy(end(stream)));
      }
  };
  each([] {
    CUdeviceptr address;
    return cu().cuMemAlloc(&address, 4);
  });
  each([] {
    void* host;
    return cu().cuMemHostAlloc(&host, 4, 0);
  });
  each([&] { return cu().cuEventQuery(event); });
  each([&] { return cu().cuStreamQuery(other); });
  each([&] { return cu().cuStreamSynchronize(other); });
  each([&] {
    CUfunction function;
    return cu().cuModuleGetFunction(&function, session.module, "test_copy");
  });
}

TEST(what_a_capture_refuses_spoils_it) {
  const Session session;
  const CUstream stream = new_stream(), other = new_stream();
  const CUevent before = new_event(), theirs = new_event(), inside = new_event();
  std::uint32_t pageable[4];
  const CUdeviceptr address = device_words(4);
  OK(cu().cuEventRecord(before, other));
  begin(stream);
  const CUgraphExec executable = end(stream);
  const auto each = [&](CUresult code, auto call) {
    begin(stream, CU_STREAM_CAPTURE_MODE_RELAXED);
    EXPECT(code, call());
    expect_spoiled(stream);
  };
  each(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, [&] { return cu().cuStreamQuery(stream); });
  each(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, [&] { return cu().cuStreamSynchronize(stream); });
  each(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
       [&] { return cu().cuGraphLaunch(executable, stream); });
  each(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
       [&] { return cu().cuMemcpyAsync(number(pageable), address, 16, stream); });
  each(CUDA_ERROR_STREAM_CAPTURE_ISOLATION,
       [&] { return cu().cuStreamWaitEvent(stream, before, 0); });
  begin(other);
  OK(cu().cuEventRecord(theirs, other));
  each(CUDA_ERROR_STREAM_CAPTURE_MERGE, [&] { return cu().cuStreamWaitEvent(stream, theirs, 0); });
  expect_spoiled(other);
  // The one who began it ends it, with all streams joined.
  CUgraph graph = nullptr;
  begin(stream, CU_STREAM_CAPTURE_MODE_RELAXED);
  OK(cu().cuEventRecord(inside, stream));
  EXPECT(CUDA_ERROR_CAPTURED_EVENT, cu().cuEventQuery(inside));
  OK(cu().cuStreamWaitEvent(other, inside, 0));
  OK(cu().cuMemsetD32Async(address, 1, 1, other));
  EXPECT(CUDA_ERROR_STREAM_CAPTURE_UNJOINED, cu().cuStreamEndCapture(stream, &graph));
  EXPECT(CUDA_ERROR_CAPTURED_EVENT, cu().cuStreamWaitEvent(other, inside, 0));
  begin(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
  std::thread([&] {
    OK(cu().cuCtxPushCurrent(session.context));
    EXPECT(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, cu().cuStreamEndCapture(stream, &graph));
  }).join();
  expect_spoiled(stream);
}

CUipcMemHandle handle_of(CUdeviceptr address) {
  CUipcMemHandle handle;
  OK(cu().cuIpcGetMemHandle(&handle, address));
  return handle;
}

CUresult open(const CUipcMemHandle& handle, CUdeviceptr* address) {
  return cu().cuIpcOpenMemHandle(address, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
}

PART(exports_two_and_frees_one) {
  const Session session;
  const CUdeviceptr freed = device_words(64), kept = device_words(64);
  OK(cu().cuMemsetD32Async(kept, 5, 64, nullptr));
  OK(cu().cuStreamSynchronize(nullptr));
  send(3, handle_of(kept));
  send(3, handle_of(freed));
  CUdeviceptr address = 0;
  EXPECT(CUDA_ERROR_INVALID_CONTEXT, open(handle_of(kept), &address));
  CUipcMemHandle inside;
  EXPECT(CUDA_ERROR_INVALID_VALUE, cu().cuIpcGetMemHandle(&inside, kept + 4));
  receive<int>(3);
  EXPECT(CUDA_ERROR_ILLEGAL_ADDRESS, cu().cuMemFree(freed));  // the other maps it still
  send(3, 1);
  receive<int>(3);
}
TEST(an_opener_outlives_the_exporter) {
  const Session session;
  const CUstream stream = new_stream();
  const Process process("exports_two_and_frees_one");
  const auto kept = receive<CUipcMemHandle>(process.socket);
  const auto freed = receive<CUipcMemHandle>(process.socket);
  CUdeviceptr address = 0, gone = 0, again = 0;
  OK(open(kept, &address));
  OK(open(freed, &gone));
  send(process.socket, 0);
  receive<int>(process.socket);
  CHECK(first_word(gone, stream) == 0xdddddddd);
  EXPECT(CUDA_ERROR_INVALID_VALUE, cu().cuMemFree(gone));
  OK(cu().cuIpcCloseMemHandle(gone));
  EXPECT(CUDA_ERROR_INVALID_VALUE, open(freed, &again));
  kill(process.pid, SIGKILL);
  CHECK(WIFSIGNALED(process.end().second));
  CHECK(first_word(address, stream) == 5);
  OK(cu().cuIpcCloseMemHandle(address));
  EXPECT(CUDA_ERROR_INVALID_VALUE, cu().cuMemsetD32Async(address, 0, 1, stream));
  EXPECT(CUDA_ERROR_MAP_FAILED, open(kept, &again));  // nobody is there to open it from
}

}  // namespace

// A fault shall end the process by its signal, also under the sanitizers, which look for these.
extern "C" [[gnu::visibility("default")]] const char* __asan_default_options() {
  return "handle_segv=0:handle_sigbus=0";
}
extern "C" [[gnu::visibility("default")]] const char* __tsan_default_options() {
  return "handle_segv=0:handle_sigbus=0:atexit_sleep_ms=0";
}

int main(int count, char** arguments) {
  if (count > 1) {
    alarm(120);
    for (const Named& one : all_named())
      if (std::strcmp(one.name, arguments[1]) == 0) {
        one.body();
        std::fflush(nullptr);
        _exit(0);  // streams may still spin, as those of a program that ends may
      }
    return 1;
  }
  bool failed = false;
  for (const Named& one : all_named()) {
    if (!one.test) continue;
    const auto [text, status] = Process(one.name).end();
    failed |= !ended_well(status);
    std::printf("%-44s %s\n", one.name, ended_well(status) ? "ok" : "FAILED");
    if (!ended_well(status)) std::printf("status %d\n%s\n", status, text.c_str());
    std::fflush(stdout);
  }
  return failed;
}
