// How long a thread has waited, counted by its looks at what it waits for.
//
// A pause of this process (SIGSTOP, a debugger, a frozen container) must not count as lateness of
// others. So each look counts for at most a second, or half the limit if that is less. And time is
// over only one look after the limit was reached, so that the thread sees what came meanwhile.
#pragma once

#include <algorithm>
#include <chrono>

namespace pycollective {

using Clock = std::chrono::steady_clock;

class WaitingTime {
 public:
  using Seconds = std::chrono::duration<double>;

  // `limit`: seconds from the first look.
  explicit WaitingTime(double limit) : limit_(limit), most_a_look_(std::min(1.0, limit / 2)) {}

  // Called after each look that found nothing. `grace`: seconds beyond the limit.
  bool is_over(Clock::time_point now, double grace = 0) {
    const bool over = waited_.count() >= limit_ + grace;
    if (last_ != Clock::time_point{}) waited_ += std::min<Seconds>(now - last_, most_a_look_);
    last_ = now;
    return over;
  }
  Seconds waited() const { return waited_; }
  Seconds left() const { return Seconds(std::max(limit_ - waited_.count(), 0.0)); }
  double limit() const { return limit_; }

 private:
  double limit_;
  Seconds most_a_look_;
  Seconds waited_{0};
  Clock::time_point last_{};
};

}  // namespace pycollective
