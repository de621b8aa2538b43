// Communicators that have GPUs, with ranks as threads: calls from several threads and on several
// streams, and every way to end beside kernels that wait. By kernels, and by way of the host.
#include <atomic>
#include <cstdio>
#include <functional>
#include <string>
#include <thread>

#include "tests/calls.h"
#include "tests/cases.h"
#include "tests/gpu_threads.h"

namespace pycollective::testing {
namespace {

// Within kSoon all ranks know of an abort, and their GPUs are idle: 5 ms, where nothing else runs.
// A timeout of kShort comes while one rank is awaited, not while the others have yet to come.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr double kSoon = 20;  // seconds
constexpr double kShort = 8;
#else
constexpr double kSoon = 1;
constexpr double kShort = 1;
#endif

using Clock = std::chrono::steady_clock;
using Arrays = std::vector<std::unique_ptr<Array>>;  // by rank

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

Arrays make_arrays(int ranks, std::size_t count) {
  Arrays arrays;
  for (int r = 0; r < ranks; ++r)
    arrays.push_back(std::make_unique<Array>(GpuThreads::device(r), count));
  return arrays;
}

const Array& of(const Arrays& arrays, int rank) { return *arrays[static_cast<std::size_t>(rank)]; }

// Of one call: what it left, and where it may be looked at.
void check_sum(const Turn& turn, const Array& from, const Array& to, int rank, bool ended) {
  CHECK((ended ? to.look() : to.read()) == turn.sum);
  CHECK(from.look() == turn.of(rank));
}

// Each rank's threads make a call each, at once and on a stream of their own, which one first is
// not known: all of a turn are of the same input.
void many_threads_and_streams(GpuThreads& ranks, std::size_t count, int turns, bool kernels) {
  enum How { kEnds, kInOrder, kAsync, kAsyncInOrder, kWays };
  const int n = ranks.size();
  std::vector<Turn> wanted;
  for (int i = 0; i < turns; ++i) wanted.emplace_back(n, count, 17 * static_cast<unsigned>(i));
  ranks.run([&](int r) {
    Arrays inputs, outputs;
    for (int how = 0; how < kWays; ++how) {
      inputs.push_back(std::make_unique<Array>(GpuThreads::device(r), count));
      outputs.push_back(std::make_unique<Array>(GpuThreads::device(r), count));
    }
    for (const Turn& turn : wanted) {
      std::vector<std::thread> threads;
      for (int how = 0; how < kWays; ++how)
        threads.emplace_back([&, how] {
          const Array& from = of(inputs, how);
          const Array& to = of(outputs, how);
          from.write(turn.of(r));
          const bool ends = how == kEnds || how == kAsync;
          const Request request = all_reduce(from, to, ends);
          if (how == kEnds || how == kInOrder) {
            ranks.at(r).run(request, {});
          } else {
            std::atomic<int> told{0};
            const auto work = ranks.at(r).submit(request, [&](const Failure* failure) {
              CHECK(failure == nullptr);
              ++told;
            });
            CHECK(work->wait(kLongest, {}));
            while (told == 0) std::this_thread::yield();  // it may come after done()
            CHECK(told == 1);
          }
          check_sum(turn, from, to, r, ends || !kernels);
        });
      for (std::thread& thread : threads) thread.join();
    }
    CHECK(ranks.at(r).failure() == nullptr);
    ranks.at(r).close();
  });
}

// One thread's, alternately on two streams, none awaited before the last is issued.
void many_in_flight(GpuThreads& ranks, std::size_t count) {
  constexpr std::size_t kCalls = 8;
  const int n = ranks.size();
  std::vector<Turn> turns;
  for (unsigned i = 0; i < kCalls; ++i) turns.emplace_back(n, count, 100 + i);
  ranks.run([&](int r) {
    Arrays inputs, outputs;
    std::vector<std::shared_ptr<Work>> works;
    for (std::size_t i = 0; i < kCalls; ++i) {
      inputs.push_back(std::make_unique<Array>(GpuThreads::device(r), count));
      outputs.push_back(std::make_unique<Array>(GpuThreads::device(r), count));
      inputs.back()->write(turns[i].of(r));
    }
    for (std::size_t i = 0; i < kCalls; ++i) {
      const Request request =
          all_reduce(*inputs[i], *outputs[i], i % 3 == 0, outputs[i % 2]->stream());
      works.push_back(ranks.at(r).submit(request, nullptr));
    }
    for (const auto& work : works) CHECK(work->wait(kLongest, {}));
    for (const int stream : {0, 1}) CHECK(of(outputs, stream).idle_in(kLongest));
    for (std::size_t i = 0; i < kCalls; ++i) CHECK(outputs[i]->look() == turns[i].sum);
    CHECK(ranks.at(r).failure() == nullptr);
    ranks.at(r).close();
  });
}

// What is on the last rank's stream keeps its GPU from the call, so that the others' kernels wait.
// `during`: while they do. Then the call's outcome, by rank: what it threw.
std::vector<Failure> beside_waiting_kernels(GpuThreads& ranks, const Arrays& arrays, bool ends,
                                            const std::function<void(Busy&)>& during,
                                            double timeout = kLongest) {
  const int last = ranks.size() - 1;
  std::vector<Failure> failures(arrays.size());
  std::atomic<int> returned{0};
  Busy busy(of(arrays, last));
  std::thread calls([&] {
    ranks.run([&](int r) {
      Request request = all_reduce(of(arrays, r), of(arrays, r), ends);
      request.timeout = timeout;
      failures[static_cast<std::size_t>(r)] = failure_of([&] { ranks.at(r).run(request, {}); });
      ++returned;
    });
  });
  const Clock::time_point begin = Clock::now();
  const auto wait_for = [&](const std::function<bool()>& comes) {
    while (!comes()) {
      CHECK(seconds_since(begin) < kLongest);
      std::this_thread::yield();
    }
  };
  for (int r = 0; r <= last; ++r) wait_for([&] { return !of(arrays, r).idle(); });
  if (!ends) wait_for([&] { return returned == ranks.size(); });
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  for (int r = 0; r <= last; ++r) CHECK(!of(arrays, r).idle());
  CHECK(returned == (ends ? 0 : ranks.size()));
  during(busy);
  busy.let_go();
  calls.join();
  return failures;
}

void all_wait_no_more(GpuThreads& ranks, const Arrays& arrays, Clock::time_point begin) {
  for (int r = 0; r + 1 < ranks.size(); ++r)
    CHECK(of(arrays, r).idle_in(kSoon - seconds_since(begin)));
}

// By a thread that makes no call. Nobody asks for failure() before the GPUs are idle. Whether the
// last rank, whose kernel begins last, was told before it: else it finds all that its peers have
// published, and waits for none.
bool abort_ends_all(int n, bool ends) {
  GpuThreads ranks(n);
  const Arrays arrays = make_arrays(n, 1000);
  const Turn turn(n, 1000, 5);
  for (int r = 0; r < n; ++r) of(arrays, r).write(turn.of(r));
  Clock::time_point begin;
  const std::vector<Failure> failures = beside_waiting_kernels(ranks, arrays, ends, [&](Busy&) {
    begin = Clock::now();
    ranks.at(1).abort("it is enough");
    all_wait_no_more(ranks, arrays, begin);
  });
  if (ends) CHECK(seconds_since(begin) < kSoon);
  CHECK(of(arrays, n - 1).idle_in(kSoon));
  bool in_time = true;
  for (int r = 0; r < n; ++r) {
    const Failure& thrown = failures[static_cast<std::size_t>(r)];
    CHECK(thrown.kind == (ends ? FailureKind::kAborted : FailureKind::kNone));
    if (ends) CHECK(contains(thrown.message, "it is enough"));
    const auto known = ranks.at(r).failure();
    CHECK(known && known->kind == FailureKind::kAborted);
    CHECK(contains(known->message, "it is enough"));
    const Request request = all_reduce(of(arrays, r), of(arrays, r), ends);
    CHECK(failure_of([&] { ranks.at(r).run(request, {}); }).kind == FailureKind::kAborted);
    const Data now = of(arrays, r).look();
    if (r == n - 1 && now == turn.sum)
      in_time = false;
    else
      CHECK(now == turn.of(r));  // what came no more has moved nothing
  }
  return in_time;
}

// Async calls behind one that waits are told, too.
void abort_tells_what_is_pending(int n) {
  GpuThreads ranks(n);
  const Arrays arrays = make_arrays(n, 1000);
  std::vector<std::shared_ptr<Work>> works;
  std::atomic<int> told{0};
  {
    Busy busy(of(arrays, n - 1));
    for (int call = 0; call < 3; ++call)
      for (int r = 0; r < n; ++r)
        works.push_back(ranks.at(r).submit(all_reduce(of(arrays, r), of(arrays, r), true),
                                           [&](const Failure* failure) {
                                             CHECK(failure != nullptr);
                                             CHECK(failure->kind == FailureKind::kAborted);
                                             ++told;
                                           }));
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    for (const auto& work : works) CHECK(!work->done());
    const Clock::time_point begin = Clock::now();
    ranks.at(0).abort("it is enough");
    for (const auto& work : works)
      CHECK(failure_of([&] { work->wait(kLongest, {}); }).kind == FailureKind::kAborted);
    CHECK(seconds_since(begin) < kSoon);
    all_wait_no_more(ranks, arrays, begin);
  }
  const Clock::time_point begin = Clock::now();
  while (told < 3 * n && seconds_since(begin) < kLongest) std::this_thread::yield();
  CHECK(told == 3 * n);
}

// close() waits for kernels that peers are needed for, and what they give is right.
void close_beside_running_kernels(int n, std::size_t count) {
  GpuThreads ranks(n);
  const Arrays arrays = make_arrays(n, count);
  const Turn turn(n, count, 7);
  for (int r = 0; r < n; ++r) of(arrays, r).write(turn.of(r));
  std::atomic<bool> let_go{false};
  const auto failures = beside_waiting_kernels(ranks, arrays, false, [&](Busy& busy) {
    std::thread later([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      let_go = true;
      busy.let_go();
    });
    ranks.run([&](int r) {
      ranks.at(r).close();
      CHECK(let_go && of(arrays, r).idle());
    });
    later.join();
  });
  for (int r = 0; r < n; ++r) {
    CHECK(failures[static_cast<std::size_t>(r)].kind == FailureKind::kNone);
    CHECK(of(arrays, r).look() == turn.sum);
    const Request request = all_reduce(of(arrays, r), of(arrays, r), true);
    const Failure refused = failure_of([&] { ranks.at(r).run(request, {}); });
    CHECK(refused.kind == FailureKind::kConfiguration && contains(refused.message, "closed"));
  }
}

void a_wait_that_is_too_long_says_for_whom(int n, bool ends) {
  GpuThreads ranks(n);
  const Arrays arrays = make_arrays(n, 1000);
  const std::string awaited = "waited for rank " + std::to_string(n - 1);
  beside_waiting_kernels(
      ranks, arrays, ends,
      [&](Busy&) {
        for (int r = 0; r + 1 < n; ++r) CHECK(of(arrays, r).idle_in(kLongest));
        const Clock::time_point begin = Clock::now();
        for (int r = 0; r < n; ++r) {
          while (ranks.at(r).failure() == nullptr) CHECK(seconds_since(begin) < kSoon);
          const auto failure = ranks.at(r).failure();
          CHECK(failure->kind == FailureKind::kTimeout);
          // Also where the call waits on the host, which does not know for whom the kernel waits.
          CHECK(contains(failure->message, awaited));
        }
      },
      kShort);
}

// Nothing is launched, and all are told.
void calls_that_differ_move_nothing(int n, GpuThreads::Way way, bool ends) {
  GpuThreads ranks(n, way);
  const Arrays arrays = make_arrays(n, 500);
  const Turn turn(n, 500, 9);
  ranks.run([&](int r) {
    const Array& array = of(arrays, r);
    array.write(turn.of(r));
    Request request = all_reduce(array, array, ends);
    if (r == n - 1) request.reduce_op = ReduceOp::kMax;
    const Failure failure = failure_of([&] { ranks.at(r).run(request, {}); });
    CHECK(failure.kind == FailureKind::kMismatch);
    CHECK(contains(failure.message, "max") && contains(failure.message, "sum"));
    CHECK(array.idle_in(kSoon) && array.look() == turn.of(r));
  });
}

// Of one that has ended, though its kernel is still to come, the next has the blocks once it has.
void blocks_of_who_ends_are_waited_for() {
  const Array array(0, 1000);
  Busy busy(array);
  auto ended = std::make_unique<GpuThreads>(1);
  ended->at(0).run(all_reduce(array, array, false), {});
  std::vector<std::shared_ptr<DeviceMailbox>> others;
  while (BlockShare::is_left(0)) others.push_back(make_mailbox(0));
  ended->at(0).abort("it is enough");
  ended.reset();
  CHECK(!BlockShare::is_left(0) && !array.idle());
  std::thread later([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    busy.let_go();
  });
  others.push_back(make_mailbox(0));
  later.join();
}

// Whoever asks is told at once.
void blocks_of_who_goes_on_are_not() {
  const int device = GpuThreads::device(1);  // where there is one alone, that
  std::vector<std::shared_ptr<DeviceMailbox>> others;
  do others.push_back(make_mailbox(device));
  while (BlockShare::is_left(device));
  const Clock::time_point begin = Clock::now();
  try {
    others.push_back(make_mailbox(device));
    CHECK(false);
  } catch (const std::runtime_error& error) {
    CHECK(contains(error.what(), "close those that are not needed"));
  }
  CHECK(seconds_since(begin) < kSoon);
}

void by_kernels(Cases& cases) {
  cases.run("blocks of who ends are waited for", blocks_of_who_ends_are_waited_for);
  cases.run("blocks of who goes on are not", blocks_of_who_goes_on_are_not);
  const int most = GpuThreads::that_fit(8);
  CHECK(most >= (driver().devices < 3 ? 6 : 8));
  for (const std::size_t count : {std::size_t{1000}, std::size_t{70'001}})
    cases.run("many threads and streams", [&] {
      GpuThreads ranks(4);
      many_threads_and_streams(ranks, count, 6, true);
    });
  for (const int n : {2, most})
    cases.run("many in flight", [&] {
      GpuThreads ranks(n);
      many_in_flight(ranks, 3000);
    });
  for (const bool ends : {true, false}) {
    cases.run("abort ends all", [&] {
      for (int tries = 1; !abort_ends_all(4, ends); ++tries) CHECK(tries < 5);
    });
    cases.run("a wait that is too long says for whom",
              [&] { a_wait_that_is_too_long_says_for_whom(3, ends); });
    cases.run("calls that differ move nothing",
              [&] { calls_that_differ_move_nothing(3, GpuThreads::Way::kKernels, ends); });
  }
  cases.run("abort tells what is pending", [] { abort_tells_what_is_pending(3); });
  cases.run("close beside running kernels, 4 ranks", [] { close_beside_running_kernels(4, 1000); });
  cases.run("close beside running kernels, 2 ranks",
            [] { close_beside_running_kernels(2, 100'000); });
}

void by_way_of_the_host(Cases& cases) {
  cases.run("many threads and streams by way of the host", [] {
    GpuThreads ranks(3, GpuThreads::Way::kHost);
    many_threads_and_streams(ranks, 3000, 3, false);
  });
  cases.run("many in flight by way of the host", [] {
    GpuThreads ranks(2, GpuThreads::Way::kHost);
    many_in_flight(ranks, 70'001);
  });
  cases.run("calls that differ move nothing by way of the host",
            [] { calls_that_differ_move_nothing(3, GpuThreads::Way::kHost, true); });
}

}  // namespace
}  // namespace pycollective::testing

int main() {
  pycollective::testing::Cases cases;
  pycollective::testing::by_kernels(cases);
  pycollective::testing::by_way_of_the_host(cases);
  std::puts("cuda group: passed");
  return 0;
}
