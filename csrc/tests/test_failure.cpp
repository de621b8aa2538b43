// How the engine fails: named culprits, every rank told, nothing left waiting; and what a blocked
// call has no part in: a pause of the process, signal handlers.
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <functional>
#include <string>
#include <utility>

#include "tests/calls.h"
#include "tests/check.h"
#include "tests/inside.h"
#include "tests/thread_ranks.h"

using namespace pycollective;
using namespace pycollective::testing;

namespace {

struct Different {
  Request one, other;  // without their buffers
  const char* said;
  const char* also;
};

Request call(OpKind kind, std::size_t count = 10, Dtype dtype = Dtype::kFloat32, int root = 0,
             ReduceOp op = ReduceOp::kSum) {
  Request request;
  request.kind = kind;
  request.count = count;
  request.dtype = dtype;
  request.root = root;
  request.reduce_op = op;
  return request;
}

// Every way in which two ranks' calls differ; the types of Python's errors follow from the kind.
void different_calls_name_both_sides_before_data_moves() {
  constexpr std::size_t kLarge = 1 << 20;
  const Request reduce = call(OpKind::kAllReduce);
  const Request broadcast = call(OpKind::kBroadcast);
  const Request gather = call(OpKind::kAllGather);
  const Request send = call(OpKind::kSend, 10, Dtype::kFloat32, 1);
  Request uneven = gather;
  uneven.counts = {10, 10};
  const Request max = call(OpKind::kAllReduce, 10, Dtype::kFloat32, 0, ReduceOp::kMax);
  Request large_max = max;
  large_max.count = kLarge;
  const Different all[] = {
      {reduce, call(OpKind::kAllReduce, 11), "count 10", "count 11"},
      {reduce, call(OpKind::kAllReduce, kLarge), "count 10)", "count 1048576"},
      {call(OpKind::kAllReduce, kLarge), large_max, "sum", "max"},
      {reduce, call(OpKind::kAllReduce, 10, Dtype::kFloat64), "float32", "float64"},
      {reduce, max, "sum", "max"},
      {reduce, broadcast, "all_reduce", "broadcast"},
      {broadcast, call(OpKind::kBroadcast, 10, Dtype::kFloat32, 1), "root 0", "root 1"},
      {call(OpKind::kBarrier, 0), reduce, "barrier()", "all_reduce"},
      {uneven, gather, "uneven counts", "count 10"},
      {send, call(OpKind::kRecv, 11), "send(float32, count 10)", "recv(float32, count 11)"},
      {send, call(OpKind::kRecv, 10, Dtype::kFloat64), "send(float32, count 10)",
       "recv(float64, count 10)"},
  };
  for (const Different& each : all) {
    const ThreadGroup group(2);
    group.run([&](int r) {
      Request request = r == 0 ? each.one : each.other;
      std::vector<float> x(4 * request.count, 1.0F);
      if (request.kind != OpKind::kBarrier) request.input = request.output = x.data();
      if (request.kind == OpKind::kAllGather) request.input = x.data() + 10 * r;
      const Failure failure = failure_of([&] { group[r]->run(request, {}); });
      CHECK(failure.kind == FailureKind::kMismatch);
      CHECK(contains(failure.message, "rank 0") && contains(failure.message, "rank 1"));
      CHECK(contains(failure.message, each.said) && contains(failure.message, each.also));
      CHECK(!contains(failure.message, "deal"));
      for (const float value : x) CHECK(value == 1.0F);  // nothing moved
      // Refused at once from now on, everywhere.
      CHECK(failure_of([&] { group[r]->run(request, {}); }).kind == FailureKind::kMismatch);
      CHECK(group[r]->failure() != nullptr);
    });
  }
}

void a_mismatch_is_seen_although_another_is_absent() {
  const ThreadGroup group(3);
  group.run([&](int r) {
    if (r == 0) return;
    std::vector<float> x(r == 2 ? 11 : 10, 1.0F);
    CHECK(failure_of([&] { group[r]->run(all_reduce(x), {}); }).kind == FailureKind::kMismatch);
  });
}

// What a peer has written may be wrong, and is looked up in no table then.
void a_mismatch_with_what_is_not_known_here() {
  const ThreadGroup group(2);
  Group& other = group[1]->group();
  ReceivingHalf& grant = other.receiving_half(Member(1), Member(0));
  grant.dtype = 231;
  grant.granted = 1;
  std::vector<float> x(10, 1.0F);
  const Failure failure = failure_of([&] { group[0]->run(pair(OpKind::kSend, x, 1), {}); });
  CHECK(failure.kind == FailureKind::kMismatch);
  CHECK(contains(failure.message, "rank 0 called send(float32, count 10) and rank 1"));
  CHECK(
      contains(failure.message, "called an operation that is not known here as message number 1"));
}

// In `stderr_of`: whether something has been written.
bool something_is_said() {
  struct stat file{};
  return fstat(STDERR_FILENO, &file) == 0 && file.st_size > 0;
}

// What `act` writes to stderr.
std::string stderr_of(const std::function<void()>& act) {
  std::FILE* file = std::tmpfile();
  const int saved = dup(STDERR_FILENO);
  dup2(fileno(file), STDERR_FILENO);
  act();
  dup2(saved, STDERR_FILENO);
  close(saved);
  std::rewind(file);
  std::string text(4096, '\0');
  text.resize(std::fread(text.data(), 1, text.size(), file));
  std::fclose(file);
  return text;
}

// What is too long for its place ends with three dots.
void a_long_report_is_seen_to_be_cut() {
  const ThreadGroup group(2);
  group[0]->abort("why: " + std::string(5000, 'x') + "the end");
  std::vector<float> x(10, 1.0F);
  const Failure failure = failure_of([&] { group[1]->run(all_reduce(x), {}); });
  CHECK(contains(failure.message, "why: xxx"));
  CHECK(contains(failure.message, "xxx... (reported by rank 0 to rank 1)"));
}

void a_long_wait_names_the_absent_once() {
  const ThreadGroup group(2);
  for (const auto& each : group)
    Inside::set_warn_after(each->group(), std::chrono::milliseconds(100));
  const std::string text = stderr_of([&] {
    group.run([&](int r) {
      if (r == 1) {
        await(something_is_said);
        std::this_thread::sleep_for(std::chrono::milliseconds(300));
      }
      std::vector<float> x(10, 1.0F);
      group[r]->run(all_reduce(x), {});
    });
  });
  CHECK(contains(text, "pycollective: rank 0 has waited "));
  CHECK(contains(text,
                 " s in all_reduce number 1: rank(s) 1 have not called it; it gives up after "
                 "60 s\n"));
  CHECK(std::count(text.begin(), text.end(), '\n') == 1);
}

void many_messages_that_wait_long_write_one_line() {
  const ThreadGroup group(2);
  Inside::set_warn_after(group[0]->group(), std::chrono::milliseconds(100));
  std::vector<std::vector<float>> x(50, std::vector<float>(1));
  std::vector<std::shared_ptr<Work>> works;
  const std::string text = stderr_of([&] {
    for (std::size_t i = 0; i < x.size(); ++i) {
      Request receive = pair(OpKind::kRecv, x[i], 1);
      receive.tag = static_cast<int>(i);
      works.push_back(group[0]->submit(receive, nullptr));
    }
    await(something_is_said);
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
  });
  // A few where some were called later than others.
  const auto lines = std::count(text.begin(), text.end(), '\n');
  CHECK(lines >= 1 && lines <= 10);
  for (std::size_t i = 0; i < x.size(); ++i) {
    Request send = pair(OpKind::kSend, x[i], 0);
    send.tag = static_cast<int>(i);
    group[1]->run(send, {});
    CHECK(works[i]->wait(10, {}));
  }
}

void timeout_names_the_absent() {
  const ThreadGroup group(4, 1);
  group.run([&](int r) {
    if (r == 1 || r == 3) return;
    std::vector<float> x(100000, 1.0F);
    const Failure failure = failure_of([&] { group[r]->run(all_reduce(x), {}); });
    CHECK(failure.kind == FailureKind::kTimeout);
    CHECK(contains(failure.message, "rank(s) 1, 3 have not called it"));
  });
}

void abort_ends_what_is_pending() {
  const ThreadGroup group(2);
  std::atomic<bool> submitted{false};
  group.run([&](int r) {
    std::vector<float> x(100000, 1.0F);
    if (r == 1) {
      await([&] { return submitted.load(); });
      return group[r]->abort("enough");
    }
    std::atomic<int> told{0};
    const auto count = [&](const Failure* failure) {
      CHECK(failure != nullptr && failure->kind == FailureKind::kAborted);
      ++told;
    };
    const auto one = group[r]->submit(all_reduce(x), count);
    const auto two = group[r]->submit(all_reduce(x), count);
    submitted = true;
    const Failure failure = failure_of([&] { one->wait(30, {}); });
    CHECK(failure.kind == FailureKind::kAborted && contains(failure.message, "rank 1 aborted"));
    CHECK(failure_of([&] { two->wait(30, {}); }).kind == FailureKind::kAborted);
    await([&] { return told == 2; });  // who waits is told first
  });
}

// An operation in whose look, after failures were looked for, another rank fails and leaves.
class Overtaken final : public Operation {
 public:
  Overtaken(Communicator& mine, Communicator& other, const Task& task)
      : Operation(mine.group(), task, 1), other_(other) {}
  void start() override {}
  State advance() override { return State::kBlocked; }
  bool finished_by(Member) const override { return false; }
  bool called_by(Member) const override { return true; }
  void compare_calls() const override {
    other_.abort("for a reason");
    other_.close();
  }

 private:
  Communicator& other_;
};

void why_a_rank_left_is_told_also_in_between() {
  const ThreadGroup group(2);
  std::vector<float> x(10, 1.0F);
  const Request request = all_reduce(x);
  const Task task(request);
  const Overtaken operation(*group[0], *group[1], task);
  Sight sight(operation.group());
  const Failure failure = failure_of([&] { Watch(30).look(operation, sight); });
  CHECK(failure.kind == FailureKind::kAborted && contains(failure.message, "for a reason"));
}

void a_wait_that_runs_out_only_says_so() {
  const ThreadGroup group(2);
  std::atomic<bool> ran_out{false};
  group.run([&](int r) {
    std::vector<float> x(100000, 1.0F);
    if (r == 1) await([&] { return ran_out.load(); });
    const auto work = group[r]->submit(all_reduce(x), nullptr);
    if (r == 0) {
      CHECK(!work->wait(0.02, {}));
      ran_out = true;
    }
    CHECK(work->wait(30, {}));
    for (const float value : x) CHECK(value == 2.0F);
  });
}

void interruption_reaches_the_peers() {
  const ThreadGroup group(2);
  group.run([&](int r) {
    std::vector<float> x(10, 1.0F);
    if (r == 1) await([&] { return group[r]->failure() != nullptr; });
    const Failure failure =
        failure_of([&] { group[r]->run(all_reduce(x), [r] { return r == 0; }); });
    CHECK(failure.kind == FailureKind::kAborted);
    CHECK(contains(failure.message, "rank 0 was interrupted"));
  });
}

// Behind pending work another thread carries out a synchronous call: it may not return before that
// thread has done with its arrays.
void an_interrupted_call_returns_when_its_arrays_are_free() {
#if defined(__SANITIZE_THREAD__)
  constexpr std::size_t kCount = 1 << 19;  // TSan spends most of its time on their shadows' pages
#else
  constexpr std::size_t kCount = 1 << 21;
#endif
  // On a fast machine one turn in fifty: more until there was one.
  std::atomic<int> interrupted_under_way{0};
  for (int i = 0; i < 30 || (interrupted_under_way == 0 && i < 2000); ++i) {
    const ThreadGroup group(2);
    group.run([&](int r) {
      std::vector<float> first(kCount, 1.0F);
      std::shared_ptr<Work> pending;
      failure_of([&] { pending = group[r]->submit(all_reduce(first), nullptr); });
      if (!pending) return;  // so late that rank 0 has been interrupted
      std::this_thread::sleep_for(std::chrono::milliseconds(1));  // the progress thread drives it
      const auto stop_at = Clock::now() + std::chrono::microseconds(500 * (i % 30));
      std::vector<float> x(kCount, 1.0F);
      bool stopped = false;
      failure_of([&] {
        group[r]->run(all_reduce(x), [&] {
          if (r == 0 && Clock::now() > stop_at && !stopped) {
            stopped = true;
            interrupted_under_way += !pending->done();
          }
          return stopped;
        });
      });
      // Interrupted before its turn it was never begun, and what is busy is the call before it.
      const bool alone = pending->done();
      if (r == 0) CHECK(!alone || !group[r]->busy());
      failure_of([&] { pending->wait(30, {}); });
    });
  }
  CHECK(interrupted_under_way > 0);
}

void bad_requests_change_nothing() {
  const ThreadGroup group(2);
  group.run([&](int r) {
    std::vector<float> x(10, 1.0F);
    Request request = all_reduce(x);
    request.reduce_op = ReduceOp::kBand;
    CHECK(failure_of([&] { group[r]->run(request, {}); }).kind == FailureKind::kConfiguration);
    request = all_reduce(x);
    request.count = 5;
    request.output = x.data() + 2;  // overlaps, not in place
    CHECK(failure_of([&] { group[r]->run(request, {}); }).kind == FailureKind::kConfiguration);
    group[r]->run(all_reduce(x), {});
    CHECK(x[9] == 2.0F);
  });
}

// A late look counts for a second, and one more look comes before time is over.
void a_pause_uses_up_a_second() {
  const Clock::time_point start = Clock::now();
  const auto after = [&](double seconds) {
    return start + std::chrono::duration_cast<Clock::duration>(WaitingTime::Seconds(seconds));
  };
  WaitingTime time(5);
  CHECK(!time.is_over(start));
  CHECK(!time.is_over(after(0.5)));
  CHECK(!time.is_over(after(3600)));  // it was stopped
  CHECK(time.waited().count() == 1.5 && time.left().count() == 3.5);
  for (int i = 1; i <= 7; ++i) CHECK(!time.is_over(after(3600 + 0.5 * i)));
  CHECK(time.is_over(after(3604)));
  WaitingTime brief(0.1);  // which a look must not use up either
  for (const double at : {0.0, 9.0, 18.0}) CHECK(!brief.is_over(after(at)));
  CHECK(brief.is_over(after(18.001)));
}

// A signal handler that runs in the middle of a call, on the thread of that call.
void closing_in_the_middle_of_a_call_ends_it() {
  for (const bool waits : {false, true}) {
    const ThreadGroup group(2);
    group.run([&](int r) {
      std::vector<float> x(10, 1.0F);
      if (r == 1) await([&] { return group[r]->failure() != nullptr; });
      const InterruptHook handler = [&] {
        if (r == 0) group[r]->close();
        return false;
      };
      const Failure failure = failure_of([&] {
        if (!waits || r == 1) return group[r]->run(all_reduce(x), handler);
        group[r]->submit(all_reduce(x), nullptr)->wait(0, handler);
      });
      CHECK(failure.kind == FailureKind::kAborted);
      CHECK(contains(failure.message, "a signal handler closed it"));
      CHECK(group[r]->closed() == (r == 0) && !group[r]->busy());
    });
  }
}

void calling_in_the_middle_of_a_call_is_refused() {
  const ThreadGroup group(2);
  std::atomic<bool> refused{false};
  group.run([&](int r) {
    std::vector<float> x(10, 1.0F);
    std::vector<float> y(10, 1.0F);
    if (r == 1) await([&] { return refused.load(); });
    const auto work = group[r]->submit(all_reduce(x), nullptr);
    const auto expect_refusal = [](const std::function<void()>& act) {
      const Failure failure = failure_of(act);
      CHECK(failure.kind == FailureKind::kConfiguration);
      CHECK(contains(failure.message, "signal handler"));
    };
    work->wait(0, [&] {
      if (refused || work->done()) return false;
      expect_refusal([&] { group[r]->run(all_reduce(y), {}); });
      expect_refusal([&] { group[r]->submit(all_reduce(y), nullptr); });
      expect_refusal([&] { work->wait(1, {}); });
      refused = true;
      return false;
    });
    group[r]->run(all_reduce(y), {});
    CHECK(x[9] == 2.0F && y[9] == 2.0F);
  });
}

}  // namespace

int main() {
  different_calls_name_both_sides_before_data_moves();
  a_mismatch_is_seen_although_another_is_absent();
  a_mismatch_with_what_is_not_known_here();
  a_long_report_is_seen_to_be_cut();
  a_long_wait_names_the_absent_once();
  many_messages_that_wait_long_write_one_line();
  timeout_names_the_absent();
  abort_ends_what_is_pending();
  why_a_rank_left_is_told_also_in_between();
  a_wait_that_runs_out_only_says_so();
  interruption_reaches_the_peers();
  an_interrupted_call_returns_when_its_arrays_are_free();
  bad_requests_change_nothing();
  a_pause_uses_up_a_second();
  closing_in_the_middle_of_a_call_ends_it();
  calling_in_the_middle_of_a_call_is_refused();
  std::puts("failure: passed");
}
