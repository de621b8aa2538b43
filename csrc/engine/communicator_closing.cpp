// How a communicator is left: what is under way ends first, and nobody touches the group after it.
#include <algorithm>
#include <thread>

#include "engine/communicator.h"

namespace pycollective {
namespace {

// How often close() looks whether another thread's call is over.
constexpr std::chrono::milliseconds kClosePoll{1};
// And whether the last on_done has returned, which takes microseconds.
constexpr std::chrono::microseconds kTellPoll{50};

}  // namespace

bool Communicator::close_if_idle(std::shared_ptr<Pending>& last) {
  const std::lock_guard lock(mutex_);
  bool busy = false;
  for (auto& [key, queue] : queues_.all()) {
    if (!queue.items.empty()) last = queue.items.back();
    busy = busy || queue.driven || !queue.items.empty();
  }
  if (busy || (device_ && !failure_ && device_->launched())) return false;
  learn_failure();
  closed_ = true;
  return true;
}

bool Communicator::in_handler() const {
  return std::find(asking_.begin(), asking_.end(), std::this_thread::get_id()) != asking_.end();
}

bool Communicator::interrupts(const InterruptHook& interrupted) {
  if (!interrupted) return false;
  const auto me = std::this_thread::get_id();
  {
    const std::lock_guard lock(mutex_);
    asking_.push_back(me);
    asked_ = asking_.size();
  }
  const bool stop = interrupted();
  const std::lock_guard lock(mutex_);
  asking_.erase(std::find(asking_.begin(), asking_.end(), me));
  asked_ = asking_.size();
  return stop || closes_after_call_ == me;
}

void Communicator::refuse_in_handler(OpKind kind) const {
  if (asked_.load(std::memory_order_relaxed) == 0) return;  // what this thread has stored it sees
  {
    const std::lock_guard lock(mutex_);
    if (!in_handler()) return;
  }
  throw CollectiveFailure(
      {FailureKind::kConfiguration, rank(), kind, 0,
       std::string(name_of(kind)) +
           " refused: it is called in a signal handler (or a finalizer) that interrupts a blocked "
           "call of this communicator on the same thread, and would wait for that call. Call it "
           "once that has returned, or end that call: abort() and close() do, here too"});
}

void Communicator::close_for_handler() {
  {
    const std::lock_guard lock(mutex_);
    if (closes_after_call_ != std::this_thread::get_id()) return;
  }
  close({});
}

void Communicator::close(const InterruptHook& interrupted) {
  if (forked()) return;
  bool is_in_handler = false;
  {
    const std::lock_guard lock(mutex_);
    is_in_handler = in_handler();
    if (is_in_handler) closes_after_call_ = std::this_thread::get_id();
  }
  // The call that is blocked on this thread can only go on once this returns.
  if (is_in_handler) return abort("a signal handler closed it in the middle of a call");
  bool stopped = false;
  const InterruptHook stop = [&] { return stopped = stopped || (interrupted && interrupted()); };
  const bool worked = !failed();
  if (!closed()) {
    closing_ = true;
    group_->ring_own();
  }
  if (device_) finish_device(stop);
  for (std::shared_ptr<Pending> last; !close_if_idle(last); last = nullptr) {
    try {
      if (last) {
        last->wait(0, stopped ? InterruptHook() : stop);
        continue;
      }
      if (device_) finish_device(stop);
      // A synchronous call of another thread, bounded by its own timeout.
      if (!stopped && stop()) abort("interrupted");
      std::this_thread::sleep_for(kClosePoll);
    } catch (const CollectiveFailure&) {
      // Told to whoever waits for that operation, and kept in failure().
    }
  }
  // Whoever is told of an end may need what the caller ends next.
  while (telling()) std::this_thread::sleep_for(kTellPoll);
  // A replay may wait for who has failed, and nobody watches it from now on.
  if (device_ && failed()) device_->abort();
  {
    // A second closer returns once the first has left.
    const std::lock_guard leaving(leaving_mutex_);
    if (device_) DeviceGroup::give_back_blocks(device_);
    group_->leave();
  }
  if (stopped)
    throw CollectiveFailure({FailureKind::kAborted, rank(), OpKind::kBarrier, 0,
                             "rank " + std::to_string(rank()) + " was interrupted in close()"});
  // Of work on the device that has ended badly meanwhile nobody else is told.
  if (device_ && worked && failed()) throw CollectiveFailure(*failure_);
}

bool Communicator::failed() const {
  const std::lock_guard lock(mutex_);
  return failure_ != nullptr;
}

bool Communicator::closed() const {
  if (forked()) return true;  // another thread of the parent may have held the lock
  const std::lock_guard lock(mutex_);
  return closed_ || closes_after_call_ != std::thread::id();
}

bool Communicator::busy() const {
  if (forked()) return false;
  const std::lock_guard lock(mutex_);
  return std::any_of(queues_.all().begin(), queues_.all().end(),
                     [](const auto& each) { return each.second.driven || each.second.waits(); });
}

bool Communicator::needs_driving() const {
  const std::lock_guard lock(mutex_);
  return (device_ && !closed_ && device_->still_watched()) ||
         std::any_of(queues_.all().begin(), queues_.all().end(),
                     [](const auto& each) { return each.second.waits(); });
}

bool Communicator::telling() const {
  const std::lock_guard lock(mutex_);
  return telling_ > 0;
}

void Communicator::announce_sleep() {
  const std::lock_guard lock(mutex_);
  if (!closed_) group_->announce_sleep();
}

}  // namespace pycollective
