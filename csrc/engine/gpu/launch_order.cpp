#include "engine/gpu/launch_order.h"

#include "cuda/driver.h"

namespace pycollective {

LaunchOrder::Stream LaunchOrder::stream_of(int device, void* handle) {
  constexpr std::uintptr_t kDefault = 1;  // and 0
  if (reinterpret_cast<std::uintptr_t>(handle) <= kDefault) return {device, nullptr};
  unsigned flags = 0;
  cuda::check(cuda::driver().cuStreamGetFlags(static_cast<cuda::CUstream>(handle), &flags),
              "cuStreamGetFlags");
  return {device, (flags & cuda::CU_STREAM_NON_BLOCKING) != 0 ? handle : nullptr};
}

std::vector<std::shared_ptr<Communicator>> LaunchOrder::communicators() const {
  std::vector<std::shared_ptr<Communicator>> found;
  const std::lock_guard lock(mutex_);
  for (const auto& [stream, calls] : turns_)
    for (const auto& [number, call] : calls)
      if (std::shared_ptr<Communicator> one = call.communicator.lock())
        found.push_back(std::move(one));
  return found;
}

void LaunchTurn::take(std::shared_ptr<LaunchOrder> order, CallToLaunch call) {
  order_ = std::move(order);
  const std::lock_guard lock(order_->mutex_);
  order_->turns_[stream_].emplace(order_->last_ + 1, std::move(call));
  number_ = ++order_->last_;
}

std::optional<CallToLaunch> LaunchTurn::before() const {
  const std::lock_guard lock(order_->mutex_);
  const auto& [number, call] = *order_->turns_.at(stream_).begin();
  if (number == number_) return std::nullopt;
  return call;
}

bool LaunchTurn::pass(std::uint64_t launch) {
  if (order_ == nullptr || guard_.forked()) return false;  // none was taken, or the parent's
  const std::lock_guard lock(order_->mutex_);
  if (number_ == 0) return false;
  launch_ = launch;
  const auto calls = order_->turns_.find(stream_);
  calls->second.erase(std::exchange(number_, 0));
  if (!calls->second.empty()) return true;
  order_->turns_.erase(calls);
  return false;
}

std::uint64_t LaunchTurn::launch() const {
  const std::lock_guard lock(order_->mutex_);
  return launch_;
}

}  // namespace pycollective
