// An operation that was issued and is not done yet: the caller's Work.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <variant>

#include "engine/gpu/on_device.h"
#include "engine/gpu/staged.h"
#include "engine/internode/pair.h"
#include "engine/operations/all_to_all_v.h"
#include "engine/operations/dealt_blocks.h"
#include "engine/operations/one_shot.h"
#include "engine/operations/point_to_point.h"
#include "engine/operations/scheduled.h"
#include "engine/operations/shared_reduce.h"
#include "engine/operations/single_copy.h"
#include "engine/operations/two_shot.h"
#include "engine/watch.h"

namespace pycollective {

// Storage for one operation of any kind, so that a call allocates nothing.
class AnyOperation {
 public:
  // Chooses the class by what all ranks agree on, never by the rank.
  Operation& make(Group& group, const Task& task, std::uint64_t sequence) {
    const Request& request = *task.request;
    if (task.device) return made_.emplace<OnDevice>(group, task, sequence);
    if (task.staging) return made_.emplace<Staged>(group, task, sequence);
    if (is_pair(request.kind)) return make_pair(group, task, sequence);
    if (request.all_to_all_v) return made_.emplace<AllToAllV>(group, task, sequence);
    if (task.program) return made_.emplace<Scheduled>(group, task, sequence);
    if (group.messenger() != nullptr)  // what follows would reduce over this host alone
      throw std::logic_error("an operation between hosts has no program");
    if (request.nodes) return made_.emplace<DealtBlocks>(group, task, sequence);
    return make_direct(group, task, sequence);
  }
  // The direct paths, on one host.
  Operation& make_direct(Group& group, const Task& task, std::uint64_t sequence) {
    const Request& request = *task.request;
    if (SingleCopy::fits(group, request)) return made_.emplace<SingleCopy>(group, task, sequence);
    if (OneShot::fits(group, request)) return made_.emplace<OneShot>(group, task, sequence);
    if (SharedReduce::fits(group, request))
      return made_.emplace<SharedReduce>(group, task, sequence);
    return made_.emplace<TwoShot>(group, task, sequence);
  }
  // Destroys the operation; the group may go afterwards.
  void end() { made_.emplace<std::monostate>(); }

 private:
  Operation& make_pair(Group& group, const Task& task, std::uint64_t sequence) {
    const Request& request = *task.request;
    if (request.root == kAnySource) return made_.emplace<ReceiveAny>(group, task, sequence);
    if (!group.member_of(request.root)) return made_.emplace<InternodePair>(group, task, sequence);
    if (request.kind == OpKind::kSend) return made_.emplace<Send>(group, task, sequence);
    return made_.emplace<Receive>(group, task, sequence);
  }

  std::variant<std::monostate, OneShot, TwoShot, SingleCopy, SharedReduce, Scheduled, Send, Receive,
               InternodePair, ReceiveAny, AllToAllV, DealtBlocks, Staged, OnDevice>
      made_;
};

class Communicator;

[[noreturn]] void throw_forked(OpKind kind, int rank);

class Pending final : public Work {
 public:
  Pending(std::shared_ptr<Communicator> owner, const Task& task, std::uint64_t sequence,
          double timeout, std::function<void(const Failure*)> on_done);

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
