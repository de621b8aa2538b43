#include "engine/gpu/on_device.h"

#include <algorithm>
#include <thread>

namespace pycollective {
namespace {

constexpr std::chrono::milliseconds kBetweenLooks{10};
constexpr std::chrono::milliseconds kLongestUnwinding{100};
constexpr std::chrono::microseconds kUnwindingPoll{50};

}  // namespace

OnDevice::~OnDevice() {
  if (!launched_ || !request_.location.ends || !task_.device->aborted()) return;
  // Its waits end within milliseconds. Until then it may write memory that the caller will free.
  const auto until = std::chrono::steady_clock::now() + kLongestUnwinding;
  while (!task_.device->look() && std::chrono::steady_clock::now() < until)
    std::this_thread::sleep_for(kUnwindingPoll);
}

// The timeout of a wait on the device: what is left of the call's. A call that is done at its
// launch has all of it, since earlier work on its stream may take long, too.
double OnDevice::seconds_left() const {
  if (!request_.location.ends) return task_.timeout;
  const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - begin_;
  return std::max(task_.timeout - passed.count(), 0.0);
}

State OnDevice::advance() {
  DeviceGroup& device = *task_.device;
  if (!launched_) {
    // The driving thread looks for a failure of the communicator.
    met_ = arrival_.complete();
    if (!met_ || device.aborted()) return State::kBlocked;
    if (task_.launch_turn && task_.launch_turn->before()) return State::kBlocked;
    launched_ = true;  // also if it fails half way: the destructor then waits for the kernel
    const std::uint64_t launch = device.launch(task_, seconds_left());
    if (task_.launch_turn && task_.launch_turn->pass(launch)) group_.wake_own_threads();
  }
  if (!request_.location.ends) return State::kDone;
  // First without the driver: a call of it may wait for the kernel that waits for a dead peer.
  std::optional<Failure> failure;
  const auto now = std::chrono::steady_clock::now();
  if (now >= next_look_) {
    next_look_ = now + kBetweenLooks;
    failure = device.lost_peer(group_);
  }
  if (!failure) {
    const bool done = device.look();
    failure = device.failure(group_);
    if (done && !failure) return device.aborted() ? State::kBlocked : State::kDone;
  }
  if (failure) {
    failure->op = request_.kind;
    failure->sequence = sequence_;
    throw CollectiveFailure(*failure);
  }
  return State::kBlocked;
}

std::string OnDevice::held_up() const {
  if (launched_) return "all ranks have called it, and its GPUs have not come to its end";
  if (!met_ || !task_.launch_turn) return "";
  const auto before = task_.launch_turn->before();
  if (!before) return "";
  return "all ranks have called it, and " + std::string(name_of(before->kind)) + " number " +
         std::to_string(before->sequence) +
         ", which this rank called before it on the same stream, is not launched: all ranks must "
         "make the calls on a stream in the same order, whatever their communicators";
}

}  // namespace pycollective
