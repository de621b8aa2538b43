// How long somebody has waited, in looks at what is awaited.
//
// A pause of this process (SIGSTOP, a debugger, a frozen container) is not taken for lateness of
// others: each look counts for at most a second, and for half of the limit where that is less; and
// the time is over only for a look that comes after one that found it over, so that what has come
// meanwhile has been seen.
#pragma once

#include <algorithm>
#include <chrono>

namespace pycollective {

using Clock = std::chrono::steady_clock;

class WaitingTime {
 public:
  using Seconds = std::chrono::duration<double>;

  // `limit` in seconds, from the first look.
  explicit WaitingTime(double limit) : limit_(limit), most_a_look_(std::min(1.0, limit / 2)) {}

  // After each look that has found nothing. `grace`: seconds beyond the limit.
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
