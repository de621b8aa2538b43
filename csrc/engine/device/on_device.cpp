#include "engine/device/on_device.h"

namespace pycollective {
namespace {

constexpr std::chrono::milliseconds kBetweenLooks{10};

}  // namespace

State OnDevice::advance() {
  DeviceGroup& device = *request_.device;
  if (!launched_) {
    if (!rendezvous_.complete()) return State::kBlocked;
    device.launch(request_);
    launched_ = true;
  }
  if (!request_.location.ends) return State::kDone;
  const bool done = device.look();
  auto failure = device.failure(group_);
  // Its own failure, or another's, has a cause that whoever drives this looks for.
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
