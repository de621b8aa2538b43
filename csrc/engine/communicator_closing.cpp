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

void Communicator::close(const InterruptHook& interrupted) {
  if (forked()) return;
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
  return closed_;
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
