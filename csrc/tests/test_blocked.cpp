// A blocked call, and what its peers have no part in: a pause of the process, signal handlers.
#include <atomic>
#include <cstdio>
#include <functional>

#include "tests/calls.h"
#include "tests/check.h"
#include "tests/thread_ranks.h"

using namespace pycollective;
using namespace pycollective::testing;

namespace {

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
    ThreadRanks threads(2);
    const auto group = threads.make_group();
    threads.run([&](int r) {
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
  ThreadRanks threads(2);
  const auto group = threads.make_group();
  std::atomic<bool> refused{false};
  threads.run([&](int r) {
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
  a_pause_uses_up_a_second();
  closing_in_the_middle_of_a_call_ends_it();
  calling_in_the_middle_of_a_call_is_refused();
  std::puts("blocked: passed");
}
