#include "engine/device/on_device.h"

#include <algorithm>
#include <thread>

namespace pycollective {
namespace {

constexpr std::chrono::milliseconds kBetweenLooks{10};
constexpr std::chrono::milliseconds kLongestUnwinding{100};
constexpr std::chrono::microseconds kUnwindingPoll{50};

}  // namespace

OnDevice::~OnDevice() {
  if (!launched_ || !request_.location.ends || !request_.device->aborted()) return;
  // Its waits end within milliseconds; until then it may write what the caller is about to free.
  const auto until = std::chrono::steady_clock::now() + kLongestUnwinding;
  while (!request_.device->look() && std::chrono::steady_clock::now() < until)
    std::this_thread::sleep_for(kUnwindingPoll);
}

// What is left of its time for a wait on the device. A call that does not end there has all of it:
// what is on its stream before may take long, too.
double OnDevice::seconds_left() const {
  if (!request_.location.ends) return request_.timeout;
  const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - begin_;
  return std::max(request_.timeout - passed.count(), 0.0);
}

State OnDevice::advance() {
  DeviceGroup& device = *request_.device;
  if (!launched_) {
    // What has failed the communicator, whoever drives this looks for.
    if (!rendezvous_.complete() || device.aborted()) return State::kBlocked;
    launched_ = true;  // also where it fails half way: the kernel is waited for
    device.launch(request_, seconds_left());
  }
  if (!request_.location.ends) return State::kDone;
  const bool done = device.look();
  auto failure = device.failure(group_);
  if (done && !failure) return device.aborted() ? State::kBlocked : State::kDone;
  const auto now = std::chrono::steady_clock::now();
  if (!failure && now >= next_look_) {
    next_look_ = now + kBetweenLooks;
    failure = device.lost_peer(group_);
  }
  if (failure) {
    failure->op = request_.kind;
    failure->sequence = sequence_;
    throw CollectiveFailure(*failure);
  }
  return State::kBlocked;
}

}  // namespace pycollective
