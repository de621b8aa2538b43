// What a communicator does for calls that kernels carry out, beside launching them: failures on the
// device become its own, and its own end the waits there.
#include <algorithm>
#include <optional>
#include <thread>

#include "engine/communicator.h"
#include "engine/far/messenger.h"

namespace pycollective {
namespace {

// How often the device is looked at while something is under way there, and nothing else is.
constexpr std::chrono::milliseconds kWatchEvery{5};
// Of links that ring no bell, and of copies to and from GPUs.
constexpr std::chrono::microseconds kPollEvery{200};
constexpr std::chrono::microseconds kFinishPoll{50};

}  // namespace

std::chrono::nanoseconds Communicator::longest_sleep() const {
  if (awaits_device_ || (group_->messenger() != nullptr && !group_->messenger()->rings()))
    return kPollEvery;
  if (device_ && device_->under_way()) return kWatchEvery;
  return kLookEvery;
}

void Communicator::watch_device(bool look) {
  bool failed = false;
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    learn_failure();
    failed = failure_ != nullptr;
  }
  if (failed) device_->abort();
  device_->look();
  if (failed) return;
  std::optional<Failure> failure = device_->failure(*group_);
  if (!failure && look && device_->under_way()) failure = device_->lost_peer(*group_);
  if (failure) fail(*failure);
}

void Communicator::finish_device() {
  const Clock::time_point until =
      Clock::now() + std::chrono::duration_cast<Clock::duration>(
                         std::chrono::duration<double>(std::min(timeout_.load(), 1e9)));
  // The peers have called all that this rank has launched: what they read of its mailbox must be
  // there until their GPUs have come to the end of it, too.
  while (!device_->look() || !device_->peers_have_done(*group_)) {
    const bool failed = group_->failure().kind != FailureKind::kNone || device_->failure(*group_) ||
                        device_->lost_peer(*group_);
    if (failed) device_->abort();
    if (Clock::now() >= until) return device_->abort();
    std::this_thread::sleep_for(kFinishPoll);
  }
}

}  // namespace pycollective
