// What a communicator does for calls that kernels carry out, beside launching them: failures on the
// device become its own, and its own end the waits there.
#include <optional>
#include <thread>

#include "engine/communicator.h"
#include "engine/internode/messenger.h"

namespace pycollective {
namespace {

// How often the device is looked at while a launch is under way there, and nothing else is. Where a
// graph was captured, which may be replayed at any time or never again, as often as anything is.
constexpr std::chrono::milliseconds kWatchEvery{5};
// Of links that ring no bell, and of copies to and from GPUs.
constexpr std::chrono::microseconds kPollEvery{200};
constexpr std::chrono::microseconds kFinishPoll{50};
constexpr double kLongestUnwinding = 1;  // seconds

}  // namespace

std::chrono::nanoseconds Communicator::longest_sleep() const {
  if (awaits_device_ || (group_->messenger() != nullptr && !group_->messenger()->rings()))
    return kPollEvery;
  if (device_ && device_->launched()) return kWatchEvery;
  return kLookEvery;
}

void Communicator::watch_device(bool look) {
  const std::unique_lock leaving(leaving_mutex_, std::try_to_lock);
  if (!leaving) return;
  bool failed = false;
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    learn_failure();
    failed = failure_ != nullptr;
  }
  if (failed) device_->abort();
  std::optional<Failure> failure;
  // First what needs no driver: a call of it may wait for the very kernel that waits for the dead.
  // fail() sets the abort word before it calls the driver.
  if (!failed && look && device_->under_way()) failure = device_->lost_peer(*group_);
  if (failure) return fail(*failure);
  device_->look();
  if (!failed) failure = device_->failure(*group_);
  if (failure) fail(*failure);
}

bool Communicator::device_is_done() {
  if (!device_->look()) return false;
  const std::lock_guard leaving(leaving_mutex_);
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return true;
  }
  // The peers have called all that this rank has launched: what they read of its mailbox must be
  // there until their GPUs have come to the end of it, too.
  return device_->peers_have_done(*group_);
}

void Communicator::finish_device(const InterruptHook& stop) {
  const auto has_failed = [this] {
    const std::lock_guard lock(mutex_);
    return closed_ || failure_ != nullptr;
  };
  const double seconds = timeout_;
  // Watched first: on a dead peer no driver's call may come before the abort.
  for (WaitingTime time(seconds);;) {
    watch_device(true);
    if (has_failed() || device_is_done()) break;
    if (stop && stop()) {
      abort("interrupted");
    } else if (time.is_over(Clock::now())) {
      fail({FailureKind::kTimeout, rank(), OpKind::kBarrier, 0,
            "rank " + std::to_string(rank()) +
                " timed out where it closed its communicator: after its timeout of " +
                seconds_text(seconds) +
                " work was still under way on GPUs: look at what is on their streams before"});
    }
    std::this_thread::sleep_for(kFinishPoll);
  }
  // Its waits end within milliseconds; what it still writes belongs to the caller.
  for (WaitingTime time(kLongestUnwinding); !device_->look() && !time.is_over(Clock::now());)
    std::this_thread::sleep_for(kFinishPoll);
}

}  // namespace pycollective
