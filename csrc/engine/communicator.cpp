#include "engine/communicator.h"

#include <sched.h>

#include <algorithm>
#include <new>
#include <system_error>
#include <thread>
#include <utility>

#include "engine/any_operation.h"
#include "engine/gpu/staged.h"
#include "engine/internode/messenger.h"
#include "engine/operations/internode_pair.h"
#include "engine/plans/program.h"
#include "engine/task.h"

namespace pycollective {
namespace {

// How a blocked thread waits. Where each rank has a core, it spins without yielding: a thread that
// yields beside a busy process gets its core back a whole time slice later. After kAwakeFor it
// sleeps: a spinning thread has used up its slice when its peer comes back, a sleeping one has not.
// Where the awaited rank needs this very core, spinning costs 25 times the whole call.
constexpr int kSpinsWithCores = 2000;  // before it reads the clock
constexpr int kSpinsCrowded = 20;
constexpr int kPollsCrowded = 2;  // a look at a link costs as much as ten at a flag
constexpr std::chrono::microseconds kAwakeFor{500};
// Shorter if the threads that bring a message and wake this one, or the sending rank, need that
// core.
constexpr std::chrono::microseconds kYieldBeforeWake{50};
constexpr std::chrono::microseconds kYieldCrowded{20};
// How long a thread sleeps while it awaits another host and the link wakes nobody (MPI). (Linux
// adds some 50 us.)
constexpr std::chrono::microseconds kPollEvery{20};
// The same for the progress thread, also while copies to or from a GPU are under way.
constexpr std::chrono::microseconds kProgressPollEvery{200};
// How many operations of a queue the progress thread ends before it looks at the next queue.
constexpr int kMostInARow = 32;
// How often the progress thread looks at the device while only launches are under way. (A captured
// graph, which may be replayed at any time, is looked at every kLookEvery.)
constexpr std::chrono::milliseconds kWatchEvery{5};
// How often close() looks whether launches are done. A device wakes nobody.
constexpr std::chrono::microseconds kDevicePoll{50};
constexpr double kLongestUnwinding = 1;  // seconds that close() waits for kernels after an abort
// How often close() looks whether another thread's call is over.
constexpr std::chrono::milliseconds kClosePoll{1};
// How often close() looks whether the last on_done has returned, which takes microseconds.
constexpr std::chrono::microseconds kCallbackPoll{50};

void relax_core() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Turns any error into a failure of the group, also one such as no memory for a channel: the peers
// wait for an operation that this rank cannot carry out.
Failure failure_from(const std::exception& error, OpKind kind, std::uint64_t sequence, int rank) {
  if (const auto* known = dynamic_cast<const CollectiveFailure*>(&error)) {
    Failure failure = known->failure();
    // A link's errors name no operation.
    if (!failure.names_operation()) failure.op = kind, failure.sequence = sequence;
    return failure;
  }
  const bool no_memory = dynamic_cast<const std::bad_alloc*>(&error) != nullptr;
  return {FailureKind::kAborted, rank, kind, sequence,
          "rank " + std::to_string(rank) + " could not carry out " + name_of(kind) + " number " +
              std::to_string(sequence) + ": " +
              (no_memory ? "it has no memory left" : error.what())};
}

bool fails_group(const std::exception& error) {
  return dynamic_cast<const EndedByClose*>(&error) == nullptr;
}

}  // namespace

Communicator::Communicator(std::unique_ptr<Group> group, std::shared_ptr<Progress> progress,
                           double timeout)
    : group_(std::move(group)),
      progress_(std::move(progress)),
      plans_(std::make_shared<PlanCache>(group_->world().size)),
      timeout_(timeout) {
  group_->messages().set_recv_order(this);
}

Communicator::~Communicator() {
  if (!device_) return;
  if (forked()) {
    static_cast<void>(new std::shared_ptr<DeviceGroup>(std::move(device_)));  // the parent's
    return;
  }
  DeviceGroup::give_back_blocks(device_);
  group_->leave();  // keeps the device's memory as long as peers may read it
}

void Communicator::run(const Request& request, const InterruptHook& interrupted,
                       const std::function<void()>& about_to_wait) {
  if (forked()) throw_forked(request.kind, rank());
  const bool quick = is_quick(request);
  if (!quick) about_to_wait();
  refuse_in_handler(request.kind);
  validate(request, rank(), size());
  Task task(request);
  fill_in(task);
  require_memory(task);
  const double timeout = task.timeout > 0 ? task.timeout : timeout_.load();
  std::unique_lock lock(mutex_);
  Queue& queue = queues_.of(request);
  check_usable(lock, queue, request);
  const std::uint64_t sequence = enqueue_order(queue, task);
  std::shared_ptr<Pending> pending;
  if (queue.items.empty() && !queue.driven) {
    queue.driven.store(true, std::memory_order_relaxed);
    queue.has_successor.store(false, std::memory_order_relaxed);
    queue.call_order = task.recv_order;
  } else {
    pending = add_pending(lock, queue, task, sequence, timeout, nullptr);
  }
  lock.unlock();
  if (pending) {
    about_to_wait();
    progress_->carry_on(shared_from_this());
    // Returns or throws only once it is done: its arrays are in use until then.
    pending->wait(0, interrupted);
    if (request.source != nullptr) *request.source = pending->source();
    return;
  }
  AnyOperation storage;
  const auto end = [&] {
    storage.end();  // before other threads may close the group
    end_call(queue, request);
  };
  Watch watch(timeout);
  try {
    Operation& operation = storage.make(*group_, task, sequence);
    operation.start();
    drive(operation, watch, nullptr, interrupted, &about_to_wait);
  } catch (const std::exception& error) {
    about_to_wait();
    const Failure failure = tell_of(error, request.kind, sequence);
    end();
    close_for_handler();
    throw CollectiveFailure(failure);
  }
  end();
}

std::shared_ptr<Work> Communicator::submit(const Request& request,
                                           std::function<void(const Failure*)> on_done) {
  Task task(request);
  return issue(task, std::move(on_done));
}

std::shared_ptr<Work> Communicator::issue(Task& task, std::function<void(const Failure*)> on_done) {
  const Request& request = *task.request;
  if (forked()) throw_forked(request.kind, rank());
  refuse_in_handler(request.kind);
  validate(request, rank(), size());
  task.asynchronous = true;
  fill_in(task);
  require_memory(task);
  const double timeout = task.timeout > 0 ? task.timeout : timeout_.load();
  std::unique_lock lock(mutex_);
  Queue& queue = queues_.of(request);
  check_usable(lock, queue, request);
  const std::uint64_t sequence = enqueue_order(queue, task);
  const bool first = queue.items.empty() && !queue.driven;
  const auto pending = add_pending(lock, queue, task, sequence, timeout, std::move(on_done));
  if (first) {
    queue.driven = true;
    queue.driven_item = pending.get();
  }
  lock.unlock();
  // Started here rather than on the progress thread: the peers see the call at once, and the last
  // rank to arrive with a small message finishes without a change of threads. The progress thread
  // drives a large one.
  if (first)
    act_on_first(queue, *pending, Leftover::kHandToProgress, [&] {
      Operation& operation = pending->start();
      return operation.is_short() && operation.advance() == State::kDone;
    });
  else
    progress_->carry_on(shared_from_this());
  return pending;
}

std::shared_ptr<std::byte> Communicator::allocate(std::size_t bytes) {
  const auto refuse = [this](const std::string& why) {
    throw CollectiveFailure(
        Failure::of_no_operation(FailureKind::kConfiguration, rank(), "empty refused: " + why));
  };
  if (forked()) refuse("this process is a fork of the one that made the communicator");
  if (closed()) refuse("this communicator is closed");
  // All that is left may be one rank's, but those of a host mostly ask at the same time. So what is
  // there for one is looked at first (one piece needs no look of its own), and before each piece
  // what is there for all.
  const auto check = [this](std::size_t piece, int ranks) {
    if (memory_check_) memory_check_("empty", piece, ranks);
  };
  if (bytes > ArrayHeap::kPiece) check(bytes, 1);
  try {
    return group_->node().arrays().allocate(
        bytes, [&](std::size_t piece) { check(piece, group_->size()); });
  } catch (const std::system_error& error) {
    refuse(error.what());
    throw;
  }
}

// Filling in what a request leaves open.

const std::shared_ptr<const Program>& Communicator::direct_paths() {
  static const std::shared_ptr<const Program> none = std::make_shared<const Program>();
  return none;
}

void Communicator::fill_in(Task& task) {
  const Request& request = *task.request;
  const bool on_gpu =
      !request.location.on_host() && request.location.device != Location::kAnyDevice;
  if (!request.location.on_host() && device_ && DeviceGroup::serves(request.kind))
    return fill_in_for_device(task);
  const bool internode = group_->messenger() != nullptr;
  if (internode) group_->messenger()->poll();  // a failure elsewhere is then known
  if (task.program == direct_paths())
    task.program = nullptr;
  else if (!task.program && plans_->chooses() && !is_pair(request.kind) && !request.all_to_all_v &&
           !request.nodes)
    task.program = plans_->chosen(request);
  if (internode && task.wire == Wire::kDefault && !is_pair(request.kind) && !request.all_to_all_v)
    task.wire = wire_.load(std::memory_order_relaxed);
  // A group with little memory, one of hundreds, can always take the direct paths.
  if (!internode && task.program && task.program != request.program &&
      !Scheduled::fits(*group_, task))
    task.program = nullptr;
  if (!on_gpu) return;
  try {
    task.staging = stage(request, rank(), size());
  } catch (const cuda::DriverError& error) {
    fail_call(request, error);
  }
}

void Communicator::fill_in_for_device(Task& task) {
  watch_device(false);  // learns of failures there
  if (task.program == direct_paths()) task.program = nullptr;
  if (!(task.timeout > 0)) task.timeout = timeout_.load();
  const OpKind kind = task.request->kind;
  try {
    device_->prepare(task);
    if (task.captured && task.asynchronous)
      throw std::invalid_argument(
          "while its stream is captured a call cannot be asynchronous: it might be launched after "
          "the capture; leave async_op out, nothing is waited for");
  } catch (const cuda::DriverError& error) {
    fail_call(*task.request, error);
  } catch (const std::exception& error) {
    throw CollectiveFailure({FailureKind::kConfiguration, rank(), kind, 0,
                             std::string(name_of(kind)) + ": " + error.what()});
  }
  task.device = device_;
}

void Communicator::fail_call(const Request& request, const cuda::DriverError& error) {
  const Failure failure{FailureKind::kAborted, rank(), request.kind, 0,
                        "rank " + std::to_string(rank()) + " could not carry out " +
                            name_of(request.kind) + ": " + error.what()};
  fail(failure);
  if (device_) device_->abort();  // fail() does nothing if another thread has just closed
  throw CollectiveFailure(failure);
}

void Communicator::require_memory(const Task& task) {
  if (task.program && !task.device) Scheduled::require_fit(*group_, task);
  const DealtNodes* nodes = task.request->nodes.get();
  if (nodes != nullptr && !task.program && (group_->messenger() || nodes->rows.size() != 1))
    throw CollectiveFailure({FailureKind::kConfiguration, rank(), task.request->kind, 0,
                             "nodes that are not one each on one host need a program"});
  if (task.request->kind == OpKind::kSend || task.request->all_to_all_v)
    require_channel_memory(*task.request);
}

void Communicator::require_channel_memory(const Request& request) {
  if (!memory_check_) return;
  std::vector<Outgoing*> first;
  const auto add = [&](Member peer) {
    Outgoing& channel = group_->messages().to(peer);
    if (!channel.has_memory.load(std::memory_order_relaxed)) first.push_back(&channel);
  };
  if (!request.all_to_all_v) {
    if (const auto peer = group_->member_of(request.root)) add(*peer);
  } else {
    for (const Member each : group_->members())
      if (each != group_->me()) add(each);
  }
  if (first.empty()) return;
  memory_check_(name_of(request.kind), first.size() * kChannelBuffer,
                static_cast<int>(group_->world().local_ranks.size()));
  for (Outgoing* each : first) each->has_memory.store(true, std::memory_order_relaxed);
}

// The queues.

void Communicator::check_usable(std::unique_lock<std::mutex>& lock, Queue& queue,
                                const Request& request) {
  const auto refuse = [&](FailureKind kind, const std::string& why) {
    const std::uint64_t sequence = queues_.sequence_of(queue) + 1;
    queues_.erase_if_empty(queue);
    const CollectiveFailure refused({kind, rank(), request.kind, sequence,
                                     std::string(name_of(request.kind)) + " refused: " + why});
    const bool failed = failure_ != nullptr;
    lock.unlock();
    if (failed) tell_own_notice();
    if (failed && device_) device_->abort();  // as failure() does before it tells of one
    throw refused;
  };
  if (closed_) refuse(FailureKind::kConfiguration, "this communicator is closed");
  learn_failure();
  if (failure_) refuse(failure_->kind, "this communicator failed before: " + failure_->message);
}

bool Communicator::is_turn_of(const Task& task, int source) const {
  const std::lock_guard lock(mutex_);
  return queues_.is_turn_of(task, source);
}

std::uint64_t Communicator::enqueue_order(Queue& queue, Task& task) {
  const Request& request = *task.request;
  const std::uint64_t number = ++queues_.sequence_of(queue);
  if (queues_.numbers(request)) task.recv_order = queues_.next_order();
  if (task.launch_turn)
    task.launch_turn->take(progress_->launch_order(), {request.kind, number, weak_from_this()});
  if (request.kind != OpKind::kSend || request.tag < 0) return number;
  Messages& messages = group_->messages();
  if (const auto peer = group_->member_of(request.root))
    messages.to(*peer).order.call(request.tag, number);
  else if (InternodePair::needs_lane(request))
    messages.internode().order(request.root).call(request.tag, number);
  return number;
}

std::shared_ptr<Pending> Communicator::add_pending(std::unique_lock<std::mutex>& lock, Queue& queue,
                                                   const Task& task, std::uint64_t sequence,
                                                   double timeout,
                                                   std::function<void(const Failure*)> on_done) {
  try {
    auto pending =
        std::make_shared<Pending>(shared_from_this(), task, sequence, timeout, std::move(on_done));
    queue.add(pending);
    return pending;
  } catch (const std::bad_alloc& error) {
    lock.unlock();
    tell_of(error, task.request->kind, sequence);  // the peers wait for the call of that number
    throw;
  }
}

// Carrying operations on.

bool Communicator::is_quick(const Request& request) const {
  constexpr std::size_t kMostBytes = std::size_t{32} << 10;
  static_assert(kMostBytes <= SingleCopy::kMostInSmallBuffer, "more is copied by system calls");
  const std::size_t each = size_of(request.dtype) * static_cast<std::size_t>(size());
  return request.count <= kMostBytes && request.count * each <= kMostBytes &&
         request.counts.empty() && !is_pair(request.kind) && !request.all_to_all_v &&
         !request.program && request.location.on_host() && !device_ &&
         group_->messenger() == nullptr && !plans_->chooses();
}

bool Communicator::drive(Operation& operation, Watch& watch, WaitingTime* time,
                         const InterruptHook& interrupted,
                         const std::function<void()>* about_to_wait) {
  const Messenger* const messenger = group_->messenger();
  const bool link_wakes = operation.must_poll() && messenger != nullptr && messenger->link_wakes();
  const bool cheap = group_->may_spin() && !link_wakes;  // the link's threads need a core, too
  const int most_spins = cheap                                  ? kSpinsWithCores
                         : operation.must_poll() && !link_wakes ? kPollsCrowded
                                                                : kSpinsCrowded;
  auto awake_for = link_wakes ? kYieldBeforeWake : kAwakeFor;
  if (link_wakes && !group_->may_spin()) awake_for = kYieldCrowded;
  int spins = 0;
  bool shares_core = false, noted = false;
  Clock::time_point waits_from;
  group_->publish_core();
  for (;;) {
    State state = operation.advance();
    if (state == State::kDone) return true;
    // Also while there is progress: after a failure others wait for this thread, at most one chunk.
    Watch::throw_if_failed(operation);
    if (state == State::kProgressed) {
      spins = 0;
      continue;
    }
    if (spins == 0) {
      shares_core = false;
      waits_from = {};
    }
    if (++spins == kSpinsCrowded && about_to_wait != nullptr) (*about_to_wait)();  // after 1 us
    if (cheap && spins % kSpinsCrowded == 0) {
      group_->publish_core();
      shares_core = group_->shares_core();
      if (!std::exchange(noted, true)) group_->note_shared_core(shares_core);
    }
    if (spins <= most_spins && !shares_core) {
      relax_core();
      continue;
    }
    const Clock::time_point now = Clock::now();
    if (waits_from == Clock::time_point{}) waits_from = now;
    if (time != nullptr && time->is_over(now)) return false;
    if (now < waits_from + awake_for) {
      const bool own_threads = group_->has_one_core() && progress_->awake();
      if (!cheap || shares_core || own_threads)
        sched_yield();
      else
        relax_core();
      continue;
    }
    // Announce, look once more, then sleep: a peer that publishes after this look sees us asleep.
    const std::uint32_t doorbell = group_->doorbell();
    group_->announce_sleep();
    state = operation.advance();
    if (state == State::kDone) return true;
    if (state == State::kProgressed) {
      spins = 0;
      continue;
    }
    Watch::throw_if_failed(operation);
    // Without a progress thread, drive the other queues here: a peer may wait for another operation
    // of this rank before it goes on with this one, and calls of other communicators may have to be
    // launched first.
    bool device = operation.awaits_device();
    if (!progress_->runs()) {
      state = drive_each(true, device);
      const auto others = progress_->launch_order()->communicators();
      for (const auto& each : others)
        if (each->drive_each(true, device) == State::kProgressed) state = State::kProgressed;
      // It may have started meanwhile, and have found all of that driven here.
      if (progress_->runs()) {
        progress_->carry_on(shared_from_this());
        for (const auto& each : others) progress_->carry_on(each);
      }
      if (state == State::kProgressed) {
        spins = 0;
        continue;
      }
    }
    const bool nothing_wakes = device || (operation.must_poll() && !link_wakes);
    WaitingTime::Seconds longest = nothing_wakes ? WaitingTime::Seconds(kPollEvery) : kLookEvery;
    if (time != nullptr) longest = std::min(longest, time->left());
    group_->sleep(doorbell, std::chrono::duration_cast<std::chrono::nanoseconds>(longest));
    Sight sight(*group_);
    watch.look(operation, sight);
    if (!run_interrupt_hook(interrupted)) continue;
    Watch::throw_if_failed(operation);
    throw CollectiveFailure(
        {FailureKind::kAborted, rank(), operation.request().kind, operation.sequence(),
         "rank " + std::to_string(rank()) + " was interrupted in " + name_of(operation)});
  }
}

template <class Act>
bool Communicator::act_on_first(Queue& queue, Pending& item, Leftover leftover, const Act& act) {
  Failure failure;
  try {
    const bool done = act();
    if (done)
      finish_first(queue, leftover, nullptr);
    else
      stop_driving(queue, leftover, false);
    return done;
  } catch (const std::exception& error) {
    failure = tell_of(error, item.request().kind, item.sequence());
  }
  finish_first(queue, leftover, &failure);
  return true;
}

State Communicator::poll(bool look) {
  if (device_) watch_device(look);
  awaits_device_ = false;
  const State result = drive_each(look, awaits_device_);
  if (result == State::kDone && device_ && device_->under_way()) return State::kBlocked;
  return result;
}

State Communicator::drive_each(bool look, bool& awaits_device) {
  State result = State::kDone;
  Queue* queue = nullptr;
  std::optional<Sight> sight;
  if (look) sight.emplace(*group_);
  int in_a_row = 0;
  for (std::uint64_t key = 0;;) {
    std::shared_ptr<Pending> item;
    {
      const std::lock_guard lock(mutex_);
      queue = queues_.first_waiting(key);
      if (queue == nullptr) return result;
      key = queue->key;
      item = queue->items.front();
      queue->driven = true;
      queue->driven_item = item.get();
    }
    group_->publish_core();  // not before: the group could be closed, and its memory another's
    State state = State::kProgressed;
    const bool ended = act_on_first(*queue, *item, Leftover::kSeenByThisThread, [&] {
      Operation& operation = item->start();
      state = operation.advance();
      if (state == State::kDone) return true;
      Watch::throw_if_failed(operation);
      if (state == State::kBlocked && look) item->watch().look(operation, *sight);
      awaits_device |= operation.awaits_device();
      return false;
    });
    if (!ended || ++in_a_row == kMostInARow) ++key, in_a_row = 0;
    if (state != State::kBlocked)
      result = State::kProgressed;
    else if (result == State::kDone)
      result = State::kBlocked;
  }
}

bool Communicator::help(Pending& awaited, WaitingTime& time, const InterruptHook& interrupted) {
  if (forked()) throw_forked(awaited.request().kind, rank());
  std::unique_lock lock(mutex_);
  Queue& queue = queues_.of(awaited.request());
  if (!queue.waits()) {
    queues_.erase_if_empty(queue);
    return false;
  }
  const auto has_awaited = [&](const auto& each) { return each.get() == &awaited; };
  // Another thread may be ending it just now: what comes behind may need what its waiter does next.
  if (std::none_of(queue.items.begin(), queue.items.end(), has_awaited)) return false;
  const std::shared_ptr<Pending> item = queue.items.front();
  queue.driven = true;
  queue.driven_item = item.get();
  lock.unlock();
  // Until `awaited` is done or the time is over this thread goes on with what is left.
  const bool ended = act_on_first(
      queue, *item,
      item.get() == &awaited ? Leftover::kHandToProgress : Leftover::kSeenByThisThread,
      [&] { return drive(item->start(), item->watch(), &time, interrupted, nullptr); });
  if (!ended && item.get() != &awaited) progress_->carry_on(shared_from_this());
  return ended;
}

void Communicator::stop_driving(Queue& queue, Leftover leftover, bool ended) {
  bool more = false;
  bool others_wait = false;
  {
    const std::lock_guard lock(mutex_);
    queue.driven = false;
    queue.driven_item = nullptr;
    more = !queue.items.empty();
    others_wait = ended && queues_.may_let_others_go_on(queue);
    queues_.erase_if_empty(queue);
  }
  // Other receives may go on now.
  if (others_wait) group_->wake_own_threads();
  const bool watch = device_ && device_->wants_watch();
  if (watch || (more && leftover == Leftover::kHandToProgress))
    progress_->carry_on(shared_from_this());
}

void Communicator::end_call(Queue& queue, const Request& request) {
  // The end of a message may let others go on, and a GPU may have to be watched.
  if (is_pair(request.kind) || device_) return stop_driving(queue, Leftover::kHandToProgress, true);
  // No atomic read-modify-write: it would wait for the lines that the operation has just read of
  // its peers, which otherwise come while the caller goes on. If an item comes right now and is not
  // seen here, the progress thread looks at the queue again (needs_driving), within a millisecond.
  queue.driven.store(false, std::memory_order_release);
  if (queue.has_successor.load(std::memory_order_relaxed)) progress_->carry_on(shared_from_this());
}

void Communicator::finish_first(Queue& queue, Leftover leftover, const Failure* failure) {
  std::list<std::shared_ptr<Pending>> ended;
  {
    const std::lock_guard lock(mutex_);
    ended.splice(ended.end(), queue.items, queue.items.begin());
    count_finishing(*ended.front());
  }
  stop_driving(queue, leftover, true);
  end(ended, failure);
}

void Communicator::end(const std::list<std::shared_ptr<Pending>>& items, const Failure* failure) {
  int counted = 0;
  for (const std::shared_ptr<Pending>& item : items) {
    counted += item->holds_up_close() ? 1 : 0;
    item->finish(failure);
  }
  if (counted == 0) return;
  const std::lock_guard lock(mutex_);
  finishing_ -= counted;
}

std::chrono::nanoseconds Communicator::longest_sleep() const {
  if (awaits_device_ || (group_->messenger() != nullptr && !group_->messenger()->link_wakes()))
    return kProgressPollEvery;
  if (device_ && device_->launched()) return kWatchEvery;
  return kLookEvery;
}

void Communicator::announce_sleep() {
  const std::lock_guard lock(mutex_);
  if (closed_) return;
  // Behind a synchronous call no flag of a peer lets this thread go on: end_call() wakes it.
  const bool watched = device_ && device_->still_watched();
  if (watched || queues_.first_waiting(0) != nullptr) group_->announce_sleep();
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
         std::any_of(queues_.all().begin(), queues_.all().end(), [](const auto& each) {
           return each.second.waits() || each.second.waits_for_call();
         });
}

bool Communicator::is_finishing() const {
  const std::lock_guard lock(mutex_);
  return finishing_ > 0;
}

// Failures. The first cause that this rank knew is what failure() and later calls give.

bool Communicator::heard_of_failure() const {
  const auto notice = group_->messenger() != nullptr ? group_->messenger()->notice() : nullptr;
  return notice && notice->reporter != rank();
}

std::optional<Failure> Communicator::reported_failure() const {
  const auto reported = [&](FailureKind kind, const std::string& report, int reporter) {
    return Failure::of_no_operation(kind, rank(), reported_text(report, reporter, rank()));
  };
  const FailureRecord record = group_->failure();
  if (record.kind != FailureKind::kNone)
    return reported(record.kind, group_->report_of(record.reporter),
                    group_->rank_of(record.reporter));
  if (group_->messenger() == nullptr) return std::nullopt;
  const auto notice = group_->messenger()->notice();
  if (!notice) return std::nullopt;
  return reported(notice->kind, notice->report, notice->reporter);
}

void Communicator::learn_failure() const {
  if (closed_) return;  // the mailbox may serve another group
  if (failure_) return;
  if (const auto reported = reported_failure()) failure_ = std::make_shared<Failure>(*reported);
}

bool Communicator::failed() const {
  const std::lock_guard lock(mutex_);
  return failure_ != nullptr;
}

Failure Communicator::tell_of(const std::exception& error, OpKind kind, std::uint64_t sequence) {
  try {
    Failure failure = failure_from(error, kind, sequence, rank());
    if (fails_group(error)) fail(failure);
    return failure;
  } catch (...) {
    const std::lock_guard lock(mutex_);
    if (!closed_)
      group_->fail(FailureKind::kAborted, "a rank ran out of memory as it told of a failure");
    return {FailureKind::kAborted, rank(), kind, sequence, "no memory left"};  // short: needs none
  }
}

void Communicator::fail(const Failure& failure) {
  bool notify = false;
  bool found_first = false;  // no other rank has reported a failure
  std::shared_ptr<const Failure> cause;
  std::list<std::shared_ptr<Pending>> ended;
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    // Also if this rank has known it before and told nobody.
    notify = group_->messenger() != nullptr && !peers_notified_;
    found_first = notify && group_->failure().kind == FailureKind::kNone && !heard_of_failure();
    const Failure& first = failure_ ? *failure_ : failure;
    group_->fail(first.kind, first.message);  // before there must be memory for anything
    if (!failure_) failure_ = std::make_shared<Failure>(failure);
    cause = failure_;
    peers_notified_ = true;
    for (auto each = queues_.all().begin(); each != queues_.all().end();) {
      Queue& queue = (each++)->second;
      auto first = queue.items.begin();
      if (first != queue.items.end() && first->get() == queue.driven_item) ++first;
      ended.splice(ended.end(), queue.items, first, queue.items.end());
      queues_.erase_if_empty(queue);
    }
    for (const std::shared_ptr<Pending>& item : ended) count_finishing(*item);
  }
  if (notify) group_->messenger()->tell({cause->kind, rank(), cause->message}, found_first);
  if (device_) device_->abort();
  // On purpose not with `cause`. It is mostly the same one, but `failure` names the operation that
  // saw it, which a report from a peer does not. It differs where this rank only knew of a peer's
  // failure, and abort() or a timeout comes before any operation has seen it.
  end(ended, &failure);
}

void Communicator::tell_own_notice() {
  const auto notice = group_->messenger() != nullptr ? group_->messenger()->notice() : nullptr;
  if (!notice || notice->reporter != rank()) return;
  {
    const std::lock_guard lock(mutex_);
    if (peers_notified_) return;
  }
  fail(Failure::of_no_operation(notice->kind, rank(), notice->report));
}

void Communicator::abort(const std::string& reason) {
  if (forked()) return;
  fail(Failure::of_no_operation(
      FailureKind::kAborted, rank(),
      "rank " + std::to_string(rank()) + " aborted the communicator: " + reason));
}

std::shared_ptr<const Failure> Communicator::failure() {
  if (forked()) return nullptr;
  if (group_->messenger() != nullptr) group_->messenger()->poll();
  tell_own_notice();
  if (device_) watch_device(false);
  std::shared_ptr<const Failure> known;
  {
    const std::lock_guard lock(mutex_);
    learn_failure();
    known = failure_;
    // Another thread that watches the device may not have told of a failure there yet.
    if (!known && device_ && !closed_)
      if (const auto ended = device_->failure(*group_)) known = std::make_shared<Failure>(*ended);
  }
  // The caller may replay a graph next, and the thread that found the failure may not have aborted
  // the device yet.
  if (known && device_) device_->abort();
  return known;
}

std::vector<int> Communicator::gone() {
  if (forked()) return {};
  std::vector<int> ranks;
  if (Messenger* const messenger = group_->messenger()) {
    messenger->probe();
    messenger->poll();
    ranks = messenger->gone();
  }
  const std::lock_guard lock(mutex_);
  if (closed_) return {};
  for (const Member each : group_->members())
    if (each != group_->me() && (group_->has_left(each) || !group_->alive(each)))
      ranks.push_back(group_->rank_of(each));
  return ranks;
}

void Communicator::check_peers() {
  if (forked()) return;
  std::optional<Failure> found;
  if (Messenger* const messenger = group_->messenger()) {
    messenger->await_anyone(true);
    messenger->poll();
    messenger->await_anyone(false);
  }
  {
    const std::lock_guard lock(mutex_);
    if (closed_)
      throw CollectiveFailure(Failure::of_no_operation(FailureKind::kConfiguration, rank(),
                                                       "this communicator is closed"));
    found = reported_failure();
    for (const Member each : group_->members())
      if (!found && each != group_->me() && !group_->alive(each))
        found =
            Failure::of_no_operation(FailureKind::kPeerFailure, rank(),
                                     loss_text(group_->describe(each) + " died: its process ended",
                                               group_->rank_of(each), rank()));
  }
  if (found) fail(*found);
  if (const auto known = failure()) throw CollectiveFailure(*known);
}

std::shared_ptr<const Failure> Communicator::failure_of(std::uint64_t launch) {
  std::shared_ptr<const Failure> known = failure();
  return known && !device_->has_ended_well(launch) ? known : nullptr;
}

// Watching the device: failures there become the communicator's, and the communicator's failures
// end the waits there.

void Communicator::watch_device(bool look) {
  const std::unique_lock leaving(leaving_mutex_, std::try_to_lock);
  if (!leaving) return;
  bool failed = false;
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    learn_failure();
    failed = failure_ != nullptr;
  }
  if (failed) device_->abort();
  std::optional<Failure> failure;
  // First without the driver: a call of it may wait for the GPU kernel that waits for a dead peer.
  // fail() sets the abort word before it calls the driver.
  if (!failed && look && device_->under_way()) failure = device_->lost_peer(*group_);
  if (failure) return fail(*failure);
  device_->look();
  if (!failed) failure = device_->failure(*group_);
  if (failure) fail(*failure);
}

bool Communicator::device_is_done() {
  if (!device_->look()) return false;
  const std::lock_guard leaving(leaving_mutex_);
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return true;
  }
  // The peers have called all that this rank has launched. Its mailbox must stay until their GPUs
  // are done with it, too.
  return device_->peers_have_done(*group_);
}

void Communicator::finish_device(const InterruptHook& stop) {
  const auto has_failed = [this] {
    const std::lock_guard lock(mutex_);
    return closed_ || failure_ != nullptr;
  };
  const double seconds = timeout_;
  // Watch first: with a dead peer, the abort must come before any call of the driver.
  for (WaitingTime time(seconds);;) {
    watch_device(true);
    if (has_failed() || device_is_done()) break;
    if (stop && stop()) {
      abort("interrupted");
    } else if (time.is_over(Clock::now())) {
      fail(Failure::of_no_operation(
          FailureKind::kTimeout, rank(),
          "rank " + std::to_string(rank()) +
              " timed out where it closed its communicator: after its timeout of " +
              seconds_text(seconds) +
              " work was still under way on GPUs: look at what is on their streams before"));
    }
    std::this_thread::sleep_for(kDevicePoll);
  }
  // Waits on the device end within milliseconds; until then GPU kernels write the caller's memory.
  for (WaitingTime time(kLongestUnwinding); !device_->look() && !time.is_over(Clock::now());)
    std::this_thread::sleep_for(kDevicePoll);
}

// Signal handlers that call a communicator whose call is blocked on the same thread.

bool Communicator::run_interrupt_hook(const InterruptHook& interrupted) {
  if (!interrupted) return false;
  const auto me = std::this_thread::get_id();
  {
    const std::lock_guard lock(mutex_);
    in_interrupt_hook_.push_back(me);
    interrupt_hooks_running_ = in_interrupt_hook_.size();
  }
  const bool stop = interrupted();
  const std::lock_guard lock(mutex_);
  in_interrupt_hook_.erase(std::find(in_interrupt_hook_.begin(), in_interrupt_hook_.end(), me));
  interrupt_hooks_running_ = in_interrupt_hook_.size();
  return stop || closing_caller_ == me;
}

void Communicator::refuse_in_handler(OpKind kind) const {
  if (interrupt_hooks_running_.load(std::memory_order_relaxed) == 0)
    return;  // a thread sees its own stores
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
    if (closing_caller_ != std::this_thread::get_id()) return;
  }
  close({});
}

bool Communicator::in_handler() const {
  return std::find(in_interrupt_hook_.begin(), in_interrupt_hook_.end(),
                   std::this_thread::get_id()) != in_interrupt_hook_.end();
}

// Closing: what is under way ends first, and no thread touches the group afterwards.

void Communicator::close(const InterruptHook& interrupted) {
  if (forked()) return;
  bool is_in_handler = false;
  {
    const std::lock_guard lock(mutex_);
    is_in_handler = in_handler();
    if (is_in_handler) closing_caller_ = std::this_thread::get_id();
  }
  // The call that is blocked on this thread goes on only once this returns.
  if (is_in_handler) return abort("a signal handler closed it in the middle of a call");
  bool stopped = false;
  const InterruptHook stop = [&] { return stopped = stopped || (interrupted && interrupted()); };
  const bool worked = !failed();
  if (!closed()) {
    closing_ = true;
    group_->wake_own_threads();
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
      // The waiter of that operation is told, and failure() keeps it.
    }
  }
  // An on_done may need what the caller destroys next.
  while (is_finishing()) std::this_thread::sleep_for(kCallbackPoll);
  // A replay may wait for a failed peer, and nobody watches it from now on.
  if (device_ && failed()) device_->abort();
  {
    // A second thread that closes returns once the first has left.
    const std::lock_guard leaving(leaving_mutex_);
    if (device_) DeviceGroup::give_back_blocks(device_);
    group_->leave();
  }
  if (stopped)
    throw CollectiveFailure(
        Failure::of_no_operation(FailureKind::kAborted, rank(),
                                 "rank " + std::to_string(rank()) + " was interrupted in close()"));
  // Nobody else is told of work on the device that has failed meanwhile.
  if (device_ && worked && failed()) throw CollectiveFailure(*failure_);
}

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

bool Communicator::closed() const {
  if (forked()) return true;  // a thread of the parent may have held the lock
  const std::lock_guard lock(mutex_);
  return closed_ || closing_caller_ != std::thread::id();
}

}  // namespace pycollective
