// In which order calls of several communicators are launched on a stream, what becomes of the turn
// of a call that is never launched, and what a wait says of a launch that has ended badly.
#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <string>
#include <thread>

#include "engine/gpu/on_device.h"
#include "tests/calls.h"
#include "tests/cases.h"
#include "tests/gpu_threads.h"

namespace pycollective::testing {
namespace {

// kShort: a call of which a test wants that it times out. kSoon: how soon all else happens.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr double kShort = 5;  // seconds
#else
constexpr double kShort = 2;
#endif
constexpr double kSoon = 30;
constexpr std::size_t kCount = 1000;

using Clock = std::chrono::steady_clock;
using Group = std::vector<std::shared_ptr<Communicator>>;

Communicator& of(const Group& group, int rank) { return *group[static_cast<std::size_t>(rank)]; }

template <class Comes>
void await(const Comes& comes) {
  const auto end = Clock::now() + std::chrono::duration<double>(kSoon);
  while (!comes()) {
    CHECK(Clock::now() < end);
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

// Two ranks, each with two communicators, or one, and an array for each.
struct Ranks : GpuThreads {
  explicit Ranks(int communicators = 2)
      : GpuThreads(2), other(communicators == 2 ? another() : Group()), turn(2, kCount, 3) {
    for (int r = 0; r < 2; ++r)
      for (auto* const arrays : {&first, &second}) {
        arrays->push_back(std::make_unique<Array>(device(r), kCount));
        arrays->back()->write(turn.of(r));
      }
  }
  // In place; `timeout` 0: the communicator's.
  static Request call(const Array& array, const void* stream, bool ends, double timeout = 0) {
    Request request = all_reduce(array, array, ends);
    request.location.stream = const_cast<void*>(stream);
    request.timeout = timeout;
    return request;
  }
  const Array& a(int r) const { return *first[static_cast<std::size_t>(r)]; }
  const Array& b(int r) const { return *second[static_cast<std::size_t>(r)]; }

  Group other;
  Turn turn;
  std::vector<std::unique_ptr<Array>> first, second;
};

// Rank 0 has issued the first communicator's call when rank 1 comes, so the launch of it is left to
// whoever drives it; rank 1 launches it where it calls it.
void launches_follow_the_calls(const void* const (&streams)[2][2]) {
  Ranks ranks;
  ranks.stop_progress();  // so that nobody drives what is not waited for
  std::atomic<bool> issued{false};
  ranks.run([&](int r) {
    if (r == 1) await([&] { return issued.load(); });
    const auto work =
        ranks.at(r).submit(Ranks::call(ranks.a(r), streams[r][0], false, kShort), nullptr);
    issued = true;
    of(ranks.other, r).run(Ranks::call(ranks.b(r), streams[r][1], true, 4 * kShort), {});
    CHECK(work->wait(kLongest, {}));
    CHECK(ranks.b(r).look() == ranks.turn.sum);
    await([&] { return ranks.at(r).device()->look(); });
    CHECK(ranks.at(r).failure() == nullptr && of(ranks.other, r).failure() == nullptr);
    CHECK(ranks.a(r).look() == ranks.turn.sum);
  });
}

// Blocking streams of each rank's GPU.
struct Blocking {
  explicit Blocking(int rank) : gpu(cuda::Gpu::at(GpuThreads::device(rank))) {
    const Current current(gpu.context());
    OK(driver().cuStreamCreate(&stream, 0));
  }
  ~Blocking() {
    const Current current(gpu.context());
    OK(driver().cuStreamDestroy(stream));
  }
  cuda::Gpu& gpu;
  CUstream stream = nullptr;
};

void launches_follow_the_calls_on_streams_of_their_own() {
  const Array zero(GpuThreads::device(0), 1), one(GpuThreads::device(1), 1);
  launches_follow_the_calls({{zero.stream(), zero.stream()}, {one.stream(), one.stream()}});
}

// On one GPU both ranks' would be the same stream, where the second never begins.
void launches_follow_the_calls_on_default_and_blocking_streams() {
  launches_follow_the_calls({{nullptr, nullptr}, {nullptr, nullptr}});
  const Blocking left(0), right(1);
  launches_follow_the_calls({{left.stream, nullptr}, {right.stream, nullptr}});
  launches_follow_the_calls({{nullptr, left.stream}, {nullptr, right.stream}});
}

// Rank 1 makes the second call first, which does not wait for the first on another stream.
void other_streams_wait_for_nobody() {
  Ranks ranks;
  std::atomic<bool> issued{false};
  ranks.run([&](int r) {
    const auto first = [&] {
      return ranks.at(r).submit(Ranks::call(ranks.a(r), ranks.a(r).stream(), false), nullptr);
    };
    std::shared_ptr<Work> work;
    if (r == 0) work = first();
    issued = issued || r == 0;
    await([&] { return issued.load(); });
    of(ranks.other, r).run(Ranks::call(ranks.b(r), ranks.b(r).stream(), true), {});
    if (r == 1) work = first();
    CHECK(work->wait(kLongest, {}));
    CHECK(ranks.a(r).read() == ranks.turn.sum && ranks.b(r).look() == ranks.turn.sum);
  });
}

// How the first call ends without a launch, while the second, of another communicator, waits for
// it.
enum class End { kAbort, kMismatch, kTimeout, kClose };

void turns_are_passed_on(End end) {
  Ranks ranks;
  std::atomic<bool> issued{false};
  ranks.run([&](int r) {
    const CUstream stream = ranks.b(r).stream();
    std::shared_ptr<Work> work;
    if (r == 0) {
      const double timeout = end == End::kTimeout ? kShort : 0;
      work = ranks.at(0).submit(Ranks::call(ranks.a(0), stream, false, timeout), nullptr);
      issued = true;
    }
    await([&] { return issued.load(); });
    std::thread later;
    if (r == 1)
      later = std::thread([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        if (end == End::kAbort) ranks.at(1).abort("it is enough");
        if (end == End::kClose) ranks.at(1).close();
        Request other = Ranks::call(ranks.a(1), ranks.a(1).stream(), false);
        other.reduce_op = ReduceOp::kMax;
        if (end == End::kMismatch) failure_of([&] { ranks.at(1).run(other, {}); });
      });
    of(ranks.other, r).run(Ranks::call(ranks.b(r), stream, true), {});
    CHECK(ranks.b(r).look() == ranks.turn.sum);
    if (later.joinable()) later.join();
    if (work) {
      const FailureKind kinds[] = {FailureKind::kAborted, FailureKind::kMismatch,
                                   FailureKind::kTimeout, FailureKind::kPeerFailure};
      CHECK(failure_of([&] { work->wait(kLongest, {}); }).kind == kinds[static_cast<int>(end)]);
    }
  });
}

// Ranks call in different orders, which no order of launches can mend: both are told so.
void a_turn_that_never_comes_is_told() {
  Ranks ranks;
  Failure failure;
  ranks.run([&](int r) {
    std::shared_ptr<Work> work;
    const CUstream stream = ranks.b(r).stream();
    if (r == 0) work = ranks.at(0).submit(Ranks::call(ranks.a(0), stream, false), nullptr);
    const auto told = failure_of(
        [&] { of(ranks.other, r).run(Ranks::call(ranks.b(r), stream, true, kShort), {}); });
    CHECK(told.kind == FailureKind::kTimeout);
    if (r == 0) failure = told;
    if (r == 0) ranks.at(0).abort("it is enough");
  });
  if (contains(failure.message, "reported by")) return;  // rank 1 was first to say so
  CHECK(contains(failure.message,
                 "all_reduce number 1, which this rank called before it on the same"
                 " stream, is not launched"));
}

// A wait for a call whose launch has ended badly since says so; for one that was seen to end well,
// it does not.
void a_wait_says_what_has_failed() {
  Ranks ranks(1);  // the busy stream has shares, too
  std::vector<std::shared_ptr<Work>> good(2);
  ranks.run([&](int r) {
    auto& work = good[static_cast<std::size_t>(r)];
    work = ranks.at(r).submit(Ranks::call(ranks.a(r), ranks.a(r).stream(), false), nullptr);
    CHECK(work->wait(kLongest, {}));
    await([&] { return ranks.at(r).device()->look(); });
  });
  std::shared_ptr<Work> bad[2];
  {
    Busy busy(ranks.b(1));
    for (int r = 0; r < 2; ++r)
      bad[r] =
          ranks.at(r).submit(Ranks::call(ranks.a(r), ranks.b(r).stream(), false, kShort), nullptr);
    await([&] { return bad[0]->done() && bad[1]->done(); });
    CHECK(ranks.b(0).idle_in(kSoon));
    for (int r = 0; r < 2; ++r) {
      if (r == 1) await([&] { return ranks.at(1).failure() != nullptr; });  // by rank 0's report
      const auto& work = bad[r];
      const Failure told = failure_of([&] { work->wait(kLongest, {}); });
      CHECK(told.kind == FailureKind::kTimeout && told.sequence == 2);
      CHECK(contains(told.message, "waited for rank 1"));
    }
  }
  for (const auto& work : good) CHECK(work->wait(kLongest, {}));
}

// While the driver answers nobody, a peer dies for whom a kernel waits: the kernel is told all the
// same. `lock`: the stand-in's, which takes the driver's lock or gives it back.
void a_dead_peer_is_told_before_the_driver_is_asked(void (*lock)(int), bool ends) {
  const pid_t child = fork();
  if (child == 0)
    for (;;) pause();
  Ranks ranks(1);         // the busy stream has shares, too
  ranks.stop_progress();  // the test alone looks
  Inside::set_process(ranks.at(0).group(), Member(1), child);
  Busy busy(ranks.a(1));
  const std::shared_ptr<DeviceGroup> device = ranks.at(0).device();
  Request request = Ranks::call(ranks.a(0), ranks.a(0).stream(), ends);
  std::thread peer([&] {
    failure_of([&] { ranks.at(1).run(Ranks::call(ranks.a(1), ranks.a(1).stream(), false), {}); });
  });
  Failure told;
  std::thread looks;
  const auto dies = [&] {
    CHECK(kill(child, SIGKILL) == 0);
    siginfo_t ended{};
    CHECK(waitid(P_PID, static_cast<id_t>(child), &ended, WEXITED | WNOWAIT) == 0);
    lock(1);
  };
  if (ends) {
    Task task(request);
    device->prepare(task);
    task.device = device;
    task.timeout = kLongest;
    task.launch_turn->take(std::make_shared<LaunchOrder>(), {request.kind, 1, {}});
    OnDevice call(ranks.at(0).group(), task, 1);
    call.start();
    peer.join();
    await([&] { return !ranks.a(0).idle() || call.advance() == State::kDone; });
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // until it looks for the dead
    dies();
    std::atomic<bool> over{false};
    looks = std::thread([&] {
      told = failure_of([&] { call.advance(); });
      over = true;
    });
    await([&] { return over.load(); });
    lock(0);
    looks.join();
    device->abort();
    CHECK(ranks.a(0).idle_in(kSoon));
  } else {
    ranks.at(0).run(request, {});
    peer.join();
    CHECK(!ranks.a(0).idle());
    dies();
    looks = std::thread([&] { ranks.at(0).poll(true); });
    await([&] { return device->aborted(); });
    lock(0);
    looks.join();
    const auto failure = ranks.at(0).failure();
    CHECK(failure != nullptr);
    told = *failure;
    CHECK(ranks.a(0).idle_in(kSoon));
  }
  CHECK(told.kind == FailureKind::kPeerFailure);
  waitpid(child, nullptr, 0);
  ranks.at(1).abort("it is enough");
}

void all() {
  Cases cases;
  cases.run("launches follow the calls on streams of their own",
            launches_follow_the_calls_on_streams_of_their_own);
  const char* const on_others = "launches follow the calls on default and blocking streams";
  if (driver().devices < 2)
    Cases::skip(on_others, "each rank needs a GPU of its own");
  else
    cases.run(on_others, launches_follow_the_calls_on_default_and_blocking_streams);
  cases.run("other streams wait for nobody", other_streams_wait_for_nobody);
  cases.run("turns are passed on by an abort", [] { turns_are_passed_on(End::kAbort); });
  cases.run("turns are passed on by a mismatch", [] { turns_are_passed_on(End::kMismatch); });
  cases.run("turns are passed on by a timeout", [] { turns_are_passed_on(End::kTimeout); });
  cases.run("turns are passed on by close", [] { turns_are_passed_on(End::kClose); });
  cases.run("a turn that never comes is told", a_turn_that_never_comes_is_told);
  cases.run("a wait says what has failed", a_wait_says_what_has_failed);
  void* const library = dlopen(driver().library.c_str(), RTLD_NOW | RTLD_LOCAL);
  const auto lock = reinterpret_cast<void (*)(int)>(dlsym(library, "standinLock"));
  const char* const dead = "a dead peer is told before the driver is asked";
  if (lock == nullptr) return Cases::skip(dead, "only the stand-in's lock can be held");
  for (const bool ends : {true, false})
    cases.run(dead, [&] { a_dead_peer_is_told_before_the_driver_is_asked(lock, ends); });
}

}  // namespace
}  // namespace pycollective::testing

int main() {
  pycollective::testing::all();
  std::puts("cuda order: passed");
  return 0;
}
