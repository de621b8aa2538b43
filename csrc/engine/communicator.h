// A communicator of the core: queues of operations over a group.
//
// Collectives run in the order of the calls. Messages between two ranks run in order per tag.
// A synchronous call with nothing pending before it runs on the caller's thread and allocates
// nothing. All other calls are pending work. The progress thread or a waiting caller drives them;
// one thread at a time drives a queue.
//
// The words. A Request holds the caller's arguments. It becomes a Task, which has the options
// filled in. An Operation, a state machine, carries it out. A Pending is a queued operation; the
// caller sees it as its Work. A Program is an execution plan. Without one the built-in paths run,
// which work on one host alone.
#pragma once

#include <atomic>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "engine/api.h"
#include "engine/gpu/device_group.h"
#include "engine/group.h"
#include "engine/messages.h"
#include "engine/operation.h"
#include "engine/pending.h"
#include "engine/plans/plan_cache.h"
#include "engine/progress.h"
#include "engine/queues.h"

namespace pycollective {

class Communicator final : public Collectives,
                           private RecvOrder,
                           public std::enable_shared_from_this<Communicator> {
 public:
  Communicator(std::unique_ptr<Group> group, std::shared_ptr<Progress> progress, double timeout);
  ~Communicator() override;

  int rank() const override { return group_->world().rank; }
  int size() const override { return group_->world().size; }
  void run(const Request& request, const InterruptHook& interrupted) override {
    run(request, interrupted, [] {});
  }
  // The same; calls `about_to_wait` before it does what may take more than a few microseconds, and
  // before it calls anything of the caller's. Maybe more than once. Until then it takes no lock
  // that another thread holds for longer than that.
  void run(const Request& request, const InterruptHook& interrupted,
           const std::function<void()>& about_to_wait);
  std::shared_ptr<Work> submit(const Request& request,
                               std::function<void(const Failure*)> on_done) override;
  bool wants_keep() const override { return group_->messenger() != nullptr; }
  std::shared_ptr<std::byte> allocate(std::size_t bytes) override;
  void set_wire(Wire wire) override { wire_ = wire; }
  Wire wire() const override { return wire_; }
  double timeout() const override { return timeout_; }
  void set_timeout(double seconds) override { timeout_ = seconds; }
  void abort(const std::string& reason) override;
  void close() override { close({}); }
  std::shared_ptr<const Failure> failure() override;
  // The same, but null if this launch was seen to end well before the failure.
  std::shared_ptr<const Failure> failure_of(std::uint64_t launch);
  // The ranks that have died, cannot be reached any more, or have closed this communicator; also of
  // one that has failed. None once it is closed.
  std::vector<int> gone();
  // For a caller that waits for all ranks outside of operations: call it again and again. It throws
  // CollectiveFailure where the communicator has failed. If a rank has died, it fails the
  // communicator first.
  void check_peers();

  // Where nothing is chosen, requests without a plan take the direct paths, which are for one host.
  const std::shared_ptr<PlanCache>& plans() const { return plans_; }
  // As a request's program: take the direct paths, whatever would be chosen.
  static const std::shared_ptr<const Program>& direct_paths();

  // Throws CollectiveFailure (kConfiguration) unless each of `ranks` may commit so many bytes of
  // shared memory: Linux would kill a process that touched memory it does not have. `call` is what
  // needs them. Set before the first call; without it nothing is checked.
  using MemoryCheck = std::function<void(const char* call, std::size_t bytes, int ranks)>;
  void set_memory_check(MemoryCheck check) { memory_check_ = std::move(check); }

  // From then on GPU kernels carry out calls on arrays of its GPU. Called at most once, before any
  // such call, on all ranks or none.
  void set_device(std::shared_ptr<DeviceGroup> device) { device_ = std::move(device); }
  const std::shared_ptr<DeviceGroup>& device() const { return device_; }
  // Drops the sources of plans, which may hold Python objects.
  void forget_sources() {
    plans_->set_source({});
    if (device_) device_->set_source({});
  }

  Group& group() const { return *group_; }
  bool forked() const { return group_->node().forked(); }
  bool closed() const;
  // Whether any operation is under way, a synchronous one of another thread included.
  bool busy() const;
  // Whether there is pending work that no thread drives, or that came behind a synchronous call.
  bool needs_driving() const;
  // For the progress thread: a flag of a peer wakes it, if it can then do something. Does nothing
  // once closed: the mailbox may serve another group by then.
  void announce_sleep();
  // Waits for what is under way, then leaves. Receives from any rank that have taken no message end
  // at once. If interrupted, it aborts the group, closes all the same, and throws kAborted. No
  // on_done runs once it has returned, so an on_done must not call it. If a signal handler calls it
  // in the middle of a call on the same thread, it aborts, and that call closes as it ends.
  void close(const InterruptHook& interrupted);

  // For a blocked call: calls `interrupted`, which may run a signal handler (or a finalizer) that
  // calls this communicator on this thread. True also if that has closed it.
  bool run_interrupt_hook(const InterruptHook& interrupted);
  // Refuses a call made by such a handler: it would wait for the call that it interrupts.
  void refuse_in_handler(OpKind kind) const;
  // A blocked call that ends closes the communicator where such a handler asked for it.
  void close_for_handler();

  // For the progress thread: drives each queue that no other thread drives by one step. kDone:
  // there was none. `look`: also check for dead peers and timeouts.
  State poll(bool look);
  // How long the progress thread may sleep after its last poll() unless it is woken.
  std::chrono::nanoseconds longest_sleep() const;

  // For a waiting thread: drives the queue of `awaited` until it is done (true), until `time` is
  // over, or until another thread drives that queue (false).
  bool help(Pending& awaited, WaitingTime& time, const InterruptHook& interrupted);

 private:
  // Fills in what the request leaves open: its program, and the wire.
  void fill_in(Task& task);
  // The same for calls that GPU kernels carry out.
  void fill_in_for_device(Task& task);
  // Throws unless there is shared memory for the call.
  void require_memory(const Task& task);
  // The first message to a rank of this host allocates a channel's buffer.
  void require_channel_memory(const Request& request);
  std::shared_ptr<Work> issue(Task& task, std::function<void(const Failure*)> on_done);
  // Fails the communicator and throws: peers would wait for what this rank's driver cannot do.
  [[noreturn]] void fail_call(const Request& request, const cuda::DriverError& error);
  // A failure on the device fails the communicator, and a failed communicator ends waits on the
  // device. `look`: also check whether the peers live. Requires mutex_ not held. Does nothing while
  // the group is being left, or after that.
  void watch_device(bool look);
  // Waits until no launch is under way on any rank's device. If that takes longer than the
  // communicator's timeout, the communicator fails.
  void finish_device(const InterruptHook& stop);
  bool device_is_done();
  // Throws if closed or failed. Requires mutex_ held (`lock`), and releases it before it throws.
  void check_usable(std::unique_lock<std::mutex>& lock, Queue& queue, const Request& request);
  bool is_turn_of(const Task& task, int source) const override;
  bool closes() const override { return closing_; }
  bool heard_of_failure() const;  // from another host
  // The failure that another rank has reported. Requires mutex_ held, and a group not left yet.
  std::optional<Failure> reported_failure() const;
  // Keeps that failure, unless closed. Requires mutex_ held.
  void learn_failure() const;
  // If the messenger has found a failure on this rank, fails the communicator with it, unless the
  // other ranks have been told: they may wait for this rank. Requires mutex_ not held.
  void tell_own_notice();
  // Closes if nothing is under way. Otherwise `last` is the last operation issued, or null for a
  // synchronous call.
  bool close_if_idle(std::shared_ptr<Pending>& last);
  bool failed() const;
  // Whether a request takes a direct path of this host's memory, and moves little.
  bool is_quick(const Request& request) const;
  // Drives until done (true) or until `time`, if given, is over (false). Sleeps while blocked, and
  // calls `about_to_wait`, if given, before.
  bool drive(Operation& operation, Watch& watch, WaitingTime* time,
             const InterruptHook& interrupted, const std::function<void()>* about_to_wait);
  // Whether an interrupt hook of this communicator runs on this thread. Requires mutex_ held.
  bool in_handler() const;
  // Who carries on what is left in a queue: this thread, which sees it next, or the progress
  // thread, which has to be told.
  enum class Leftover { kSeenByThisThread, kHandToProgress };
  // For the thread that drives `queue`. `act` drives the first item and returns whether it is done.
  // A failure ends the item and fails the communicator, and counts as done.
  template <class Act>
  bool act_on_first(Queue& queue, Pending& item, Leftover leftover, const Act& act);
  // For the thread of a synchronous call that has ended.
  void end_call(Queue& queue, const Request& request);
  // `ended`: one of its operations has.
  void stop_driving(Queue& queue, Leftover leftover, bool ended);
  // As poll(). Sets `awaits_device` if an operation awaits a GPU.
  State drive_each(bool look, bool& awaits_device);
  // Finishes items that were taken from their queues and counted by count_finishing(). Requires
  // mutex_ not held: an on_done may call this communicator.
  void end(const std::list<std::shared_ptr<Pending>>& items, const Failure* failure);
  bool is_finishing() const;
  // Requires mutex_ held.
  void count_finishing(const Pending& item) { finishing_ += item.holds_up_close() ? 1 : 0; }
  void finish_first(Queue& queue, Leftover leftover, const Failure* failure);
  // Gives a call its place: the number of the queue's next operation, which it returns. A send also
  // takes its place among the sends to its peer, a launch its turn on its stream, a receive its
  // place among all receives, if one of them is from any rank. Requires mutex_ held.
  std::uint64_t enqueue_order(Queue& queue, Task& task);
  // Adds the call that has got that place. Requires mutex_ held (`lock`). If there is no memory for
  // it, the communicator fails, and this throws.
  std::shared_ptr<Pending> add_pending(std::unique_lock<std::mutex>& lock, Queue& queue,
                                       const Task& task, std::uint64_t sequence, double timeout,
                                       std::function<void(const Failure*)> on_done);
  // Tells the group, and ends all pending operations. One that another thread drives is ended by
  // that thread.
  void fail(const Failure& failure);
  // The same with what ended an operation, which it returns. If there is no memory for that, tells
  // the members of this host all the same: then the operation's arrays are the caller's again, and
  // no peer takes what it reads there for a result.
  Failure tell_of(const std::exception& error, OpKind kind, std::uint64_t sequence);

  std::unique_ptr<Group> group_;
  std::shared_ptr<Progress> progress_;
  std::shared_ptr<DeviceGroup> device_;
  const std::shared_ptr<PlanCache> plans_;
  MemoryCheck memory_check_;
  std::atomic<Wire> wire_{Wire::kRaw};
  std::atomic<double> timeout_;
  // Guards the members below that are neither atomic nor the progress thread's. Not held while an
  // on_done runs, or while a link or a GPU's driver is called.
  mutable std::mutex mutex_;
  // Held while a thread reads the peers' memory to watch the device, and while close() leaves the
  // group, after which that memory may serve another. Taken before mutex_, never while it is held.
  std::mutex leaving_mutex_;
  Queues queues_;
  mutable std::shared_ptr<const Failure> failure_;
  bool peers_notified_ = false;                     // of failure_, the ranks of other hosts
  int finishing_ = 0;                               // operations in finish() that close() waits for
  std::vector<std::thread::id> in_interrupt_hook_;  // threads that are in run_interrupt_hook()
  std::atomic<std::size_t> interrupt_hooks_running_{0};  // how many
  std::thread::id closing_caller_;  // whose blocked call closes the communicator as it ends
  std::atomic<bool> closing_{false};
  bool closed_ = false;
  bool awaits_device_ = false;  // some operation, at the last poll(); the progress thread's
};

}  // namespace pycollective
