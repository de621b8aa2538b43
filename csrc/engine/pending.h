// An operation that was issued and is not done yet: the caller's Work.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>

#include "engine/task.h"
#include "engine/watch.h"

namespace pycollective {

class AnyOperation;  // engine/any_operation.h
class Communicator;

[[noreturn]] void throw_forked(OpKind kind, int rank);

class Pending final : public Work {
 public:
  Pending(std::shared_ptr<Communicator> owner, const Task& task, std::uint64_t sequence,
          double timeout, std::function<void(const Failure*)> on_done);
  ~Pending() override;

  bool done() const override { return done_.load(std::memory_order_acquire); }
  // If interrupted, it aborts the group, waits until the operation has ended (its arrays are in use
  // until then), and throws.
  bool wait(double timeout, const InterruptHook& interrupted) override;
  Failure ran_out(double timeout) const override;
  const Failure* failure() const override;
  int source() const override { return done() && !failure_ ? source_ : kAnySource; }

  const Request& request() const { return request_; }
  const Task& task() const { return task_; }
  std::uint64_t sequence() const { return sequence_; }
  Watch& watch() { return watch_; }
  // Makes and starts the operation, once. Only for the thread that drives its queue. May throw.
  Operation& start();

  // Whether close() waits for finish(): it needs the group, or calls an on_done. Valid until
  // finish() begins.
  bool holds_up_close() const {
    return on_done_ || (operation_ != nullptr && operation_->must_poll());
  }
  // Called once, by the thread that drove it or failed its communicator. Null: success. It is done
  // before on_done is called; Communicator::close() waits for that call, too. Needs no memory.
  void finish(const Failure* failure);

 private:
  void set_failure(const Failure& failure);
  // For a done operation: true, or throws its failure, which may have come after the launch.
  bool result() const;

  std::shared_ptr<Communicator> owner_;  // until done
  int owner_rank_;
  ForkGuard guard_;
  Request request_;
  Task task_;
  int source_;  // the request's
  std::uint64_t sequence_;
  Watch watch_;
  std::function<void(const Failure*)> on_done_;
  std::unique_ptr<AnyOperation> storage_;  // once started: thousands may wait for their turn
  Operation* operation_ = nullptr;
  std::optional<Failure> failure_;
  // If it was done with its launch: the communicator, which learns how the launch ends.
  std::weak_ptr<Communicator> launcher_;
  std::uint64_t launch_ = 0;
  std::atomic<bool> done_{false};
  mutable std::mutex mutex_;
  std::condition_variable changed_;
};

}  // namespace pycollective
