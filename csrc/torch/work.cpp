#include "torch/work.h"

#include <algorithm>
#include <string>
#include <utility>

#include "torch/errors.h"

namespace pycollective::shim {

bool ends_in(WaitingTime& time, pycollective::Work& work, const InterruptHook& interrupted) {
  constexpr double kBetweenLooks = 0.01;  // seconds
  while (!work.wait(std::clamp(time.left().count(), 1e-9, kBetweenLooks), interrupted))
    if (time.is_over(Clock::now())) return false;
  return true;
}

Work::Work(int rank, c10d::OpType type, std::uint64_t sequence, std::shared_ptr<AsyncCall> call,
           std::vector<std::shared_ptr<pycollective::Work>> cores)
    : c10d::Work(rank, type),
      sequence_(sequence),
      call_(std::move(call)),
      cores_(std::move(cores)) {}

bool Work::done() const {
  return std::all_of(cores_.begin(), cores_.end(), [](const auto& core) { return core->done(); });
}

const Failure* Work::failure() const {
  for (const auto& core : cores_)
    if (const Failure* failure = core->failure()) return failure;
  return nullptr;
}

bool Work::isCompleted() {
  if (!done()) return false;
  if (failure() == nullptr) call_->copy_back();
  return true;
}

bool Work::isSuccess() const { return done() && failure() == nullptr; }

std::exception_ptr Work::exception() const {
  const Failure* failure = done() ? this->failure() : nullptr;
  return failure != nullptr ? typed_exception(*failure) : nullptr;
}

std::vector<at::Tensor> Work::result() { return call_->transfer().outputs(); }

int Work::sourceRank() const {
  const auto& requests = call_->transfer().requests();
  TORCH_CHECK(requests.size() == 1 && cores_.size() == 1 && requests.front().kind == OpKind::kRecv,
              call_->transfer().name(), ": only what was received has a source rank");
  const int rank = cores_.front()->source();
  TORCH_CHECK(rank >= 0, "recv: the source is known once the message has come");
  return rank;
}

bool Work::wait(std::chrono::milliseconds timeout) {
  WaitingTime time(WaitingTime::Seconds(timeout).count());  // one for all
  typed([&](const InterruptHook& interrupted) {
    for (const auto& core : cores_) {
      if (timeout.count() > 0 ? ends_in(time, *core, interrupted) : core->wait(0, interrupted))
        continue;
      const Transfer& transfer = call_->transfer();
      throw CollectiveFailure(
          {FailureKind::kTimeout, rank_, transfer.requests().front().kind, sequence_,
           std::string(transfer.name()) + ": wait timed out after its timeout of " +
               std::to_string(timeout.count()) + " ms; the operation goes on"});
    }
  });
  call_->copy_back();
  return true;
}

void Work::abort() {
  TORCH_CHECK_NOT_IMPLEMENTED(false, call_->transfer().name(),
                              ": a single operation cannot be aborted; abort its process group");
}

c10::intrusive_ptr<Future> Work::getFuture() {
  const bool done = this->done();
  return call_->future(done, done ? failure() : nullptr);
}

}  // namespace pycollective::shim
