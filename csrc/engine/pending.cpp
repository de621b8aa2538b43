#include "engine/pending.h"

#include <algorithm>
#include <utility>

#include "engine/communicator.h"

namespace pycollective {

Pending::Pending(std::shared_ptr<Communicator> owner, const Request& request,
                 std::uint64_t sequence, double timeout,
                 std::function<void(const Failure*)> on_done)
    : owner_(std::move(owner)),
      request_(request),
      sequence_(sequence),
      watch_(timeout),
      on_done_(std::move(on_done)) {}

Operation& Pending::start() {
  if (operation_ == nullptr) {
    Operation& made = room_.make(owner_->group(), request_, sequence_);
    made.start();
    operation_ = &made;
  }
  return *operation_;
}

void Pending::finish(const Failure* failure) {
  std::shared_ptr<Communicator> owner;
  {
    const std::lock_guard lock(mutex_);
    if (failure != nullptr) failure_ = std::make_unique<Failure>(*failure);
    owner = std::move(owner_);
    done_.store(true, std::memory_order_release);
  }
  changed_.notify_all();
  if (on_done_) std::exchange(on_done_, nullptr)(failure);
}

const Failure* Pending::failure() const { return done() ? failure_.get() : nullptr; }

bool Pending::wait(double timeout, const InterruptHook& interrupted) {
  // A limit beyond any run is none; it also keeps the sum below within the clock's range.
  constexpr double kForever = 1e9;
  const auto limit = std::chrono::duration_cast<Clock::duration>(
      std::chrono::duration<double>(timeout > 0 ? std::min(timeout, kForever) : kForever));
  const Clock::time_point until = Clock::now() + limit;
  while (!done()) {
    std::shared_ptr<Communicator> owner;
    {
      const std::lock_guard lock(mutex_);
      owner = owner_;
    }
    if (!owner || owner->help(*this, until, interrupted)) continue;
    const Clock::time_point now = Clock::now();
    if (now >= until) return done();
    if (interrupted && interrupted()) {
      owner->abort("interrupted");
      break;
    }
    // Another thread drives the queue: it notifies when this operation is done, and may also stop
    // driving, so look again soon.
    std::unique_lock lock(mutex_);
    changed_.wait_until(lock, std::min(until, now + std::chrono::milliseconds(5)),
                        [this] { return done(); });
  }
  if (!done()) {
    throw CollectiveFailure(
        {FailureKind::kAborted, -1, request_.kind, sequence_, "interrupted while waiting"});
  }
  if (failure_) throw CollectiveFailure(*failure_);
  return true;
}

}  // namespace pycollective
