// While an operation is blocked: looks for what ends it, which is a dead peer or one that has left,
// a failure that another rank reports, or its timeout.
#pragma once

#include <chrono>
#include <optional>
#include <utility>

#include "engine/failure_text.h"
#include "engine/operation.h"
#include "engine/waiting_time.h"

namespace pycollective {

// A blocked thread looks at least this often, so a death is seen well within 0.2 s.
constexpr std::chrono::milliseconds kLookEvery{50};

// The state of a group's members at one moment, for all operations that are looked at then.
class Sight {
 public:
  explicit Sight(const Group& group) : group_(group), now_(Clock::now()) {}
  Clock::time_point now() const { return now_; }
  // The other members that are dead or have left. Asks Linux on the first call.
  Mask gone();
  // True on the first call alone: one warning is written, however many operations wait.
  bool may_warn() { return !std::exchange(has_warned_, true); }

 private:
  const Group& group_;
  const Clock::time_point now_;
  std::optional<Mask> gone_;
  bool has_warned_ = false;
};

class Watch {
 public:
  // `timeout`: seconds from the first look.
  explicit Watch(double timeout) : time_(timeout) {}

  // Throws a failure that another rank has reported. One load of an own cache line, so cheap enough
  // for each iteration of a wait.
  static void throw_if_failed(const Operation& operation);

  // Throws that a member is gone that has not finished its part, or the failure that it reported.
  [[noreturn]] static void throw_lost(const Operation& operation, Member member);

  // Looks for everything, at most every few milliseconds. Called after an advance() that was
  // blocked. Throws CollectiveFailure; the caller tells the group.
  void look(const Operation& operation, Sight& sight);

 private:
  void look_for_lost_peers(const Operation& operation, Mask gone) const;
  [[noreturn]] void throw_timeout(const Operation& operation) const;

  WaitingTime time_;
  Clock::time_point next_look_{};
  bool warned_ = false;
};

// "all_reduce number 17"
std::string name_of(const Operation& operation);

}  // namespace pycollective
