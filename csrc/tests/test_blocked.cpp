// What befalls a blocked call besides its peers: a pause of the process.
#include <cstdio>

#include "engine/waiting_time.h"
#include "tests/check.h"

using namespace pycollective;

namespace {

// A look that comes late counts for a second, and what has come is looked at before time is over.
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

}  // namespace

int main() {
  a_pause_uses_up_a_second();
  std::puts("blocked: passed");
}
