// A communicator of the core: queues of operations over a group.
//
// Collectives run in the order of the calls; the messages of each tag from one rank to another have
// an order of their own.
// A synchronous call with nothing pending before it runs on the caller's thread, with nothing
// allocated. Everything else is pending work, which the progress thread or whoever waits carries
// on: one thread at a time drives a queue.
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
#include "engine/operations/messages.h"
#include "engine/operations/operation.h"
#include "engine/pending.h"
#include "engine/plans/program_choices.h"
#include "engine/plans/wire_trial.h"
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
  void run(const Request& request, const InterruptHook& interrupted) override;
  std::shared_ptr<Work> submit(const Request& request,
                               std::function<void(const Failure*)> on_done) override;
  bool wants_keep() const override { return group_->messenger() != nullptr; }
  void set_wire(Wire wire) override { wire_ = wire; }
  Wire wire() const override { return wire_; }
  double timeout() const override { return timeout_; }
  void set_timeout(double seconds) override { timeout_ = seconds; }
  void abort(const std::string& reason) override;
  void close() override { close({}); }
  std::shared_ptr<const Failure> failure() override;
  // The same, unless this launch was seen to have ended well before.
  std::shared_ptr<const Failure> failure_of(std::uint64_t launch);
  // For who waits for all ranks outside of operations, again and again: throws CollectiveFailure
  // where the communicator has failed, or any rank has died, which it then fails of.
  void check_peers();

  // Chooses for requests that have no program. Without a source all take the direct paths, which
  // are for one host.
  ProgramChoices& choices() { return choices_; }
  // In place of a program: the direct paths, whatever would be chosen.
  static const std::shared_ptr<const Program>& direct_paths();

  // Asks whether each of `ranks` may commit so many bytes of shared memory, and throws
  // CollectiveFailure (kConfiguration) if not: the kernel would kill whoever touched them. Set
  // before the first call; without it nobody is asked.
  using MemoryCheck = std::function<void(OpKind, std::size_t bytes, int ranks)>;
  void set_memory_check(MemoryCheck check) { memory_check_ = std::move(check); }

  // From then on calls on arrays of its GPU are carried out there. Once, before any such call, on
  // all ranks or none.
  void set_device(std::shared_ptr<DeviceGroup> device) { device_ = std::move(device); }
  const std::shared_ptr<DeviceGroup>& device() const { return device_; }
  // Lets go of where programs come from, which may need the interpreter.
  void forget_sources() {
    choices_.set_source({});
    if (device_) device_->set_source({});
  }

  Group& group() const { return *group_; }
  bool forked() const { return group_->node().forked(); }
  bool closed() const;
  // Whether any operation is under way, a synchronous one of another thread included.
  bool busy() const;
  // Whether there is pending work that no thread drives.
  bool needs_driving() const;
  // For the progress thread. A group that was closed meanwhile may not be told any more: its words
  // may be another's.
  void announce_sleep();
  // Waits for what is under way, but for receives from any rank that have taken no message: these
  // end at once. As close(), but can be interrupted: then the group is aborted, what is under way
  // ends, the communicator is closed all the same, and kAborted is thrown. Once it returns no
  // on_done of this communicator runs; so it may not be called from one. Where a signal handler
  // interrupts a call on this very thread it aborts, and that call closes where it ends.
  void close(const InterruptHook& interrupted);

  // For a call that is blocked: asks, which may run a signal handler (or a finalizer) that calls
  // this communicator, on this thread. True also where that has closed it.
  bool interrupts(const InterruptHook& interrupted);
  // Refuses a call that such a handler makes: it would wait for the one that it interrupts.
  void refuse_in_handler(OpKind kind) const;
  // For a call that was blocked and ends.
  void close_for_handler();

  // For the progress thread: drives each queue that nobody else drives by one step. kDone: there
  // was none. `look`: also ask the kernel whether what blocks us will ever end.
  State poll(bool look);
  // After the last poll: how long the thread may sleep where no doorbell rings.
  std::chrono::nanoseconds longest_sleep() const;

  // For a thread that waits: drives the queue of `awaited` from here until it is done (true) or
  // `time` is over, or until another thread drives that queue (false).
  bool help(Pending& awaited, WaitingTime& time, const InterruptHook& interrupted);

 private:
  // Fills in what the request leaves open: its program, and the wire.
  void fill_in(Task& task, bool asynchronous);
  // The same for calls that kernels carry out.
  void fill_in_for_device(Task& task, bool asynchronous);
  void decide_wire(Task& task);
  // The shared memory that the call is the first to need.
  void require_memory(const Task& task);
  // The first message to a rank of this host makes a channel's buffer.
  void require_channel_memory(const Request& request);
  std::shared_ptr<Work> issue(Task& task, std::function<void(const Failure*)> on_done);
  // What this rank's driver cannot do its peers would wait for: fails the communicator, and throws.
  [[noreturn]] void fail_call(const Request& request, const cuda::DriverError& error);
  // What ended badly on the device fails the communicator, and what failed that ends waits on the
  // device. `look`: also ask whether the peers live. Not under the lock; does nothing while the
  // group is being left, or once it is.
  void watch_device(bool look);
  // Waits until nothing that was launched is under way on any rank's device, at most the
  // communicator's timeout: then that is its failure.
  void finish_device(const InterruptHook& stop);
  bool device_is_done();
  // Under the lock, which it lets go of where it throws.
  void check_usable(std::unique_lock<std::mutex>& lock, Queue& queue, const Request& request);
  bool has_come(const Task& task, int source) const override;
  bool closes() const override { return closing_; }
  bool heard_of_failure() const;  // from another host
  // Under the lock, both: from another rank's report. Not once the group is left.
  std::optional<Failure> reported_failure() const;
  void learn_failure() const;  // the same, unless closed
  // Fails with what its messenger has found out on this rank, unless others have been told: they
  // may wait for this rank. Not under the lock.
  void tell_own_notice();
  // Closes if nothing is under way. Otherwise what was issued last, or null for a synchronous call.
  bool close_if_idle(std::shared_ptr<Pending>& last);
  bool failed() const;
  // Drives until done (true) or until `time`, if any, is over; sleeps where there is nothing to do.
  bool drive(Operation& operation, Watch& watch, WaitingTime* time,
             const InterruptHook& interrupted);
  bool in_handler() const;  // under the lock: of a call that is blocked on this thread
  // Who drives: the progress thread looks at every queue anyway; another must hand on what is left.
  enum class Driver { kProgressThread, kCaller };
  // For the thread that drives `queue`. `act` drives the first item and says whether it is done; a
  // failure ends the item and the communicator, and counts as done.
  template <class Act>
  bool act_on_first(Queue& queue, Pending& item, Driver driver, const Act& act);
  // `ended`: one of its operations has.
  void stop_driving(Queue& queue, Driver driver, bool ended);
  // Drives each queue that nobody else drives by one step, as poll() does. `awaits_device`: set if
  // one awaits a GPU.
  State drive_each(bool look, bool& awaits_device);
  // Ends items that were taken from their queues and counted by count_telling.
  void end(const std::list<std::shared_ptr<Pending>>& items, const Failure* failure);
  bool telling() const;
  void count_telling(const Pending& item) { telling_ += item.tells() ? 1 : 0; }  // under the lock
  void finish_first(Queue& queue, Driver driver, const Failure* failure);
  // For the next operation of a queue; a send takes its turn among those to its peer, a launch its
  // turn on its stream, and where some are from any rank a receive its place in their order. Under
  // the lock.
  std::uint64_t next_number(Queue& queue, Task& task);
  // Tells the group, and ends all that is pending but what another thread drives: that thread sees
  // it and ends it.
  void fail(const Failure& failure);

  std::unique_ptr<Group> group_;
  std::shared_ptr<Progress> progress_;
  std::shared_ptr<DeviceGroup> device_;
  ProgramChoices choices_;
  MemoryCheck memory_check_;
  WireTrials wire_trials_;
  std::atomic<Wire> wire_{Wire::kAuto};
  std::atomic<double> timeout_;
  mutable std::mutex mutex_;
  std::mutex leaving_mutex_;
  Queues queues_;
  mutable std::shared_ptr<const Failure> failure_;
  bool told_ = false;  // of it the others
  int telling_ = 0;    // operations that are over and whose on_done has yet to return
  std::vector<std::thread::id> asking_;  // threads that are in interrupts()
  std::atomic<std::size_t> asked_{0};    // how many
  std::thread::id closes_after_call_;    // the last whose blocked call is to close
  std::atomic<bool> closing_{false};
  bool closed_ = false;
  bool awaits_device_ = false;  // some operation, at the last poll(); the progress thread's
};

}  // namespace pycollective
