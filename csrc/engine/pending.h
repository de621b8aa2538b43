// An operation that was issued and is not yet done: what the caller holds as its Work.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>

#include "engine/operations/any_operation.h"
#include "engine/watch.h"

namespace pycollective {

class Communicator;

[[noreturn]] void throw_forked(OpKind kind, int rank);

class Pending final : public Work {
 public:
  Pending(std::shared_ptr<Communicator> owner, const Task& task, std::uint64_t sequence,
          double timeout, std::function<void(const Failure*)> on_done);

  bool done() const override { return done_.load(std::memory_order_acquire); }
  // Once interrupted it aborts the group, waits until the operation has ended (its arrays are in
  // use until then), and throws.
  bool wait(double timeout, const InterruptHook& interrupted) override;
  Failure ran_out(double timeout) const override;
  const Failure* failure() const override;
  int source() const override { return done() && !failure_ ? source_ : kAnySource; }

  const Request& request() const { return request_; }
  const Task& task() const { return task_; }
  std::uint64_t sequence() const { return sequence_; }
  Watch& watch() { return watch_; }
  // Only by the thread that drives its queue. start() may throw.
  Operation& start();

  // Whether its end needs the group still, or somebody is told of it. Until finish() has begun.
  bool tells() const { return on_done_ || (operation_ != nullptr && operation_->must_poll()); }
  // Once, by whoever drove it or failed its communicator. nullptr: success. It is done before
  // on_done is called: who must not be overtaken by that call asks the communicator to close.
  void finish(const Failure* failure);

 private:
  // Of a done operation: true, or throws its failure, which may have come after the launch.
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
  AnyOperation room_;
  Operation* operation_ = nullptr;
  std::unique_ptr<Failure> failure_;
  // Where it is done with its launch: who learns how that ends.
  std::weak_ptr<Communicator> launcher_;
  std::uint64_t launch_ = 0;
  std::atomic<bool> done_{false};
  mutable std::mutex mutex_;
  std::condition_variable changed_;
};

}  // namespace pycollective
