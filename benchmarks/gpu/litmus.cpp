// Litmus loops for weak memory (litmus.cu): do marks ever pass their data, or slots their readers?
//
//   litmus IMAGE [seconds of each loop, 1.5] [exchanges of a launch, 20000] [loops, 6]
//
// IMAGE is that of litmus.cu. Two ranks of this process on one GPU, a stream each; on two GPUs,
// where there are; and this process and another one, on the first GPU. Contexts take turns there,
// so there are fewer exchanges. Of each:
//
//   message passing   two slots in turn, as the library's
//   slot reuse        one slot, written again as soon as it has been read
//   relaxed           the same without acquire and release: says what the machine does, no more
//   early, early done the mark before what it speaks of: must be seen, or the loops see nothing
//                     (of one process alone: a context that has its turn does both)
//
// Prints a line of JSON: exchanges of both ranks, each of `words` words, and the words that were
// wrong. Status 1 where the protocol was violated, or an early mark was not seen.
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "litmus_parameters.h"
#include "tests/cuda_streams.h"

namespace pycollective::testing {
namespace {

using Clock = std::chrono::steady_clock;
using Flags = cuda::Flags;

// What is handed over, and how.
struct Shape {
  unsigned slots;
  Flags flags;
};

struct Counted {
  std::uint64_t exchanges = 0, stale = 0, overwritten = 0, late = 0;
  Counted& operator+=(const Counted& other) {
    exchanges += other.exchanges;
    stale += other.stale;
    overwritten += other.overwritten;
    late += other.late;
    return *this;
  }
};

// One of the two ranks of a loop: its area, its kernel, a stream.
class Side {
 public:
  static constexpr std::uint64_t kLongestWait = 20'000'000'000;  // nanoseconds

  Side(int device, const std::string& image) {
    cuda::CUdevice handle = 0;
    OK(driver().cuDeviceGet(&handle, device));
    OK(driver().cuDevicePrimaryCtxRetain(&context_, handle));
    const Current current(context_);
    std::ifstream file(image, std::ios::binary);
    CHECK(file);
    const std::string bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    OK(driver().cuModuleLoadDataEx(&module_, bytes.data(), 0, nullptr, nullptr));
    OK(driver().cuModuleGetFunction(&function_, module_, "litmus_exchange"));
    int most = 0, fit = 0;
    OK(driver().cuFuncGetAttribute(&most, cuda::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK,
                                   function_));
    threads_ = static_cast<unsigned>(std::min(most, 512));
    OK(driver().cuOccupancyMaxActiveBlocksPerMultiprocessor(&fit, function_,
                                                            static_cast<int>(threads_), 0));
    const int quarter = fit * cuda::device_traits(device).multiprocessors / 4;
    blocks_ = static_cast<unsigned>(std::clamp(quarter, 1, 32));
    OK(driver().cuStreamCreate(&stream_, cuda::CU_STREAM_NON_BLOCKING));
    OK(driver().cuMemAlloc(&area_, kArea));
    OK(driver().cuMemAlloc(&counts_, counts_bytes()));
    CHECK(cuda::litmus_slot_at(blocks_, blocks_, 2, 0, threads_) <= kArea);
  }
  ~Side() {
    const Current current(context_);
    CHECK(is_idle_in(stream_, kLongest));
    OK(driver().cuStreamDestroy(stream_));
    OK(driver().cuMemFree(area_));
    OK(driver().cuMemFree(counts_));
    OK(driver().cuModuleUnload(module_));
  }
  Side(const Side&) = delete;
  Side& operator=(const Side&) = delete;

  cuda::CUcontext context() const { return context_; }
  CUdeviceptr area() const { return area_; }
  unsigned threads() const { return threads_; }

  // Nothing has been exchanged. Done when it returns: then the other may begin.
  void clear() {
    const Current current(context_);
    first_ = 0;
    OK(driver().cuMemsetD32Async(area_, 0, kArea / 4, stream_));
    OK(driver().cuMemsetD32Async(counts_, 0, counts_bytes() / 4, stream_));
    OK(driver().cuStreamSynchronize(stream_));
  }
  // So many exchanges more of each block; `other`: its area, as this context maps it. One of the
  // two lingers.
  void launch(CUdeviceptr other, const Shape& shape, unsigned exchanges, bool lingers) {
    const Current current(context_);
    cuda::LitmusParameters p{};
    p.mine = reinterpret_cast<void*>(area_);
    p.other = reinterpret_cast<void*>(other);
    p.counts = reinterpret_cast<cuda::LitmusCount*>(counts_);
    p.first = first_;
    p.exchanges = exchanges;
    p.words = threads_;
    p.slots = shape.slots;
    p.nanoseconds = kLongestWait;
    p.flags = shape.flags;
    p.lingers = lingers;
    first_ += exchanges;
    void* all[] = {&p};
    OK(driver().cuLaunchKernel(function_, blocks_, 1, 1, threads_, 1, 1, 0, stream_, all, nullptr));
  }
  // Of all launches since clear(), which have ended.
  Counted counted() const {
    const Current current(context_);
    CHECK(is_idle_in(stream_, kLongest));
    std::vector<cuda::LitmusCount> counts(std::size_t{blocks_} * threads_);
    OK(driver().cuMemcpyAsync(reinterpret_cast<CUdeviceptr>(counts.data()), counts_, counts_bytes(),
                              stream_));
    OK(driver().cuStreamSynchronize(stream_));
    Counted sum;
    for (const cuda::LitmusCount& each : counts)
      sum += {each.exchanges, each.stale, each.overwritten, each.late};
    return sum;
  }

 private:
  static constexpr std::size_t kArea = std::size_t{2} << 20;  // a peer maps nothing else with it
  std::size_t counts_bytes() const {
    return std::size_t{blocks_} * threads_ * sizeof(cuda::LitmusCount);
  }

  cuda::CUcontext context_ = nullptr;
  cuda::CUmodule module_ = nullptr;
  cuda::CUfunction function_ = nullptr;
  unsigned threads_ = 0, blocks_ = 0, first_ = 0;
  CUstream stream_ = nullptr;
  CUdeviceptr area_ = 0, counts_ = 0;
};

struct Loop {
  const char* name;
  Shape shape;
};
constexpr Loop kLoops[] = {
    {"message passing", {2, Flags::kProtocol}},
    {"slot reuse", {1, Flags::kProtocol}},
    {"message passing, relaxed", {2, Flags::kRelaxed}},
    {"slot reuse, relaxed", {1, Flags::kRelaxed}},
    {"early", {2, Flags::kEarly}},
    {"early done", {1, Flags::kEarlyDone}},
};
constexpr int kAllLoops = static_cast<int>(std::size(kLoops));
constexpr int kLoopsOfProcesses = 4;         // the first ones
constexpr unsigned kFewerEarly = 100;        // which wait long
constexpr unsigned kFewerOfProcesses = 400;  // which take turns

struct Plan {
  std::string image;
  double seconds = 1.5;
  unsigned exchanges = 20000;
  int loops = kAllLoops;  // the first ones: 2 of them are the protocol's
};

bool is_early(const Loop& loop) {
  return loop.shape.flags == Flags::kEarly || loop.shape.flags == Flags::kEarlyDone;
}

// Several, since a slot is overwritten by the next one.
unsigned fewer(unsigned exchanges, unsigned times) { return std::max(exchanges / times, 8U); }

// Whether it was as it must be.
bool report(const Loop& loop, const Counted& all, std::string& json) {
  char line[300];
  std::snprintf(line, sizeof line,
                "%s\"%s\": {\"exchanges\": %llu, \"stale\": %llu, \"overwritten\": %llu, "
                "\"late\": %llu}",
                json.empty() ? "" : ", ", loop.name, static_cast<unsigned long long>(all.exchanges),
                static_cast<unsigned long long>(all.stale),
                static_cast<unsigned long long>(all.overwritten),
                static_cast<unsigned long long>(all.late));
  json += line;
  switch (loop.shape.flags) {
    case Flags::kProtocol:
      return all.exchanges > 0 && all.stale + all.overwritten + all.late == 0;
    case Flags::kEarly:
      return all.stale > 0;
    case Flags::kEarlyDone:
      return all.overwritten > 0;
    default:
      return all.late == 0;
  }
}

// Between ranks of this process, on these GPUs.
bool between_streams(const Plan& plan, int other, std::string& json) {
  Side a(0, plan.image), b(other, plan.image);
  if (other != 0)
    for (const auto& [from, to] : {std::pair{&a, &b}, std::pair{&b, &a}}) {
      const Current current(from->context());
      OK(driver().cuCtxEnablePeerAccess(to->context(), 0));
    }
  bool right = true;
  std::string loops;
  for (int i = 0; i < plan.loops; ++i) {
    const Loop& loop = kLoops[i];
    a.clear();
    b.clear();
    const unsigned exchanges = is_early(loop) ? fewer(plan.exchanges, kFewerEarly) : plan.exchanges;
    const auto end = Clock::now() + std::chrono::duration<double>(plan.seconds);
    Counted all;
    do {
      a.launch(b.area(), loop.shape, exchanges, true);
      b.launch(a.area(), loop.shape, exchanges, false);
      all = a.counted();
      all += b.counted();
    } while (all.late == 0 && Clock::now() < end);
    right &= report(loop, all, loops);
  }
  json += ", \"one process, " + std::string(other == 0 ? "one GPU" : "two GPUs") + "\": {" + loops +
          ", \"words\": " + std::to_string(a.threads()) + "}";
  return right;
}

// The other process's end of a socket.
class Line {
 public:
  explicit Line(int socket) : socket_(socket) {
    const timeval longest{static_cast<time_t>(kLongest), 0};
    CHECK(setsockopt(socket_, SOL_SOCKET, SO_RCVTIMEO, &longest, sizeof longest) == 0);
  }
  template <class T>
  void send(const T& what) const {
    CHECK(::send(socket_, &what, sizeof what, MSG_NOSIGNAL) == static_cast<ssize_t>(sizeof what));
  }
  template <class T>
  T receive() const {
    T what;
    CHECK(::recv(socket_, &what, sizeof what, MSG_WAITALL) == static_cast<ssize_t>(sizeof what));
    return what;
  }
  // Both do.
  template <class T>
  T exchange(const T& mine) const {
    send(mine);
    return receive<T>();
  }

 private:
  const int socket_;
};

// Both processes run this; the first says how long, and counts for both.
bool between_processes(const Plan& plan, const Line& line, bool is_first, std::string& json) {
  Side side(0, plan.image);
  const Current current(side.context());
  cuda::CUipcMemHandle mine{};
  OK(driver().cuIpcGetMemHandle(&mine, side.area()));
  const auto handle = line.exchange(mine);
  CUdeviceptr area = 0;
  OK(driver().cuIpcOpenMemHandle(&area, handle, cuda::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
  bool right = true;
  std::string loops;
  for (int i = 0; i < std::min(plan.loops, kLoopsOfProcesses); ++i) {
    side.clear();
    line.exchange('c');  // before either begins
    const auto end = Clock::now() + std::chrono::duration<double>(plan.seconds);
    Counted all;
    bool goes_on = true;
    while (goes_on) {
      side.launch(area, kLoops[i].shape, fewer(plan.exchanges, kFewerOfProcesses), is_first);
      all = side.counted();
      all += line.exchange(all);
      goes_on = all.late == 0 && Clock::now() < end;
      if (is_first)
        line.send(goes_on);
      else
        goes_on = line.receive<bool>();
    }
    right &= report(kLoops[i], all, loops);
  }
  OK(driver().cuIpcCloseMemHandle(area));
  line.exchange('e');  // nobody frees what the other maps
  json += ", \"two processes, one GPU\": {" + loops +
          ", \"words\": " + std::to_string(side.threads()) + "}";
  return right;
}

}  // namespace
}  // namespace pycollective::testing

int main(int count, char** arguments) {
  using namespace pycollective::testing;
  CHECK(count > 1);
  Plan plan;
  plan.image = arguments[1];
  if (count > 2) plan.seconds = std::strtod(arguments[2], nullptr);
  if (count > 3) plan.exchanges = static_cast<unsigned>(std::strtoul(arguments[3], nullptr, 10));
  if (count > 4) plan.loops = std::atoi(arguments[4]);
  CHECK(plan.seconds > 0 && plan.exchanges > 0 && plan.loops > 0 && plan.loops <= kAllLoops);
  std::string json;
  if (count > 5) {  // the other process, given its socket
    const Line line(std::atoi(arguments[5]));
    return between_processes(plan, line, false, json) ? 0 : 1;
  }

  // Before this one has anything of the driver.
  int sockets[2];
  CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0);
  const pid_t other = fork();
  CHECK(other >= 0);
  if (other == 0) {
    close(sockets[0]);
    const std::string seconds = std::to_string(plan.seconds);
    const std::string exchanges = std::to_string(plan.exchanges);
    const std::string loops = std::to_string(plan.loops);
    execl("/proc/self/exe", arguments[0], plan.image.c_str(), seconds.c_str(), exchanges.c_str(),
          loops.c_str(), std::to_string(sockets[1]).c_str(), nullptr);
    _exit(127);
  }
  close(sockets[1]);
  bool right = between_processes(plan, Line(sockets[0]), true, json);
  int status = 0;
  CHECK(waitpid(other, &status, 0) == other);
  right &= WIFEXITED(status) && WEXITSTATUS(status) == 0;
  right &= between_streams(plan, 0, json);
  if (driver().devices > 1 && pycollective::cuda::can_access(0, 1))
    right &= between_streams(plan, 1, json);
  std::printf("{%s}\n", json.substr(2).c_str());
  return right ? 0 : 1;
}
