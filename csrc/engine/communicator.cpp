#include "engine/communicator.h"

#include <sched.h>

#include <algorithm>
#include <utility>

#include "engine/far/messenger.h"
#include "engine/validate.h"

namespace pycollective {
namespace {

// How long a blocked thread keeps its core. A spin that pays where each rank has a core costs
// 25 times the whole call where the awaited rank needs that very core.
constexpr int kSpinsWithCores = 2000;
constexpr int kSpinsCrowded = 20;
constexpr int kPollsCrowded = 2;  // a look at a link costs as much as ten at a flag
constexpr std::chrono::microseconds kYieldFor{500};
// Less where the threads that bring a message need that core, or the rank that sends it does.
constexpr std::chrono::microseconds kYieldBeforeRing{50};
constexpr std::chrono::microseconds kYieldCrowded{20};
// How long a thread sleeps that awaits another host whose link rings no bell (MPI). (The kernel
// makes it some 50 us more.)
constexpr std::chrono::microseconds kPollEvery{20};

void relax_core() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Something that is no failure of the group yet, such as no memory for a channel, becomes one: the
// peers wait for an operation that this rank cannot carry out.
Failure failure_from(const std::exception& error, OpKind kind, std::uint64_t sequence, int rank) {
  if (const auto* known = dynamic_cast<const CollectiveFailure*>(&error)) {
    Failure failure = known->failure();
    // What a link tells knows of no operation.
    if (failure.sequence == 0) failure.op = kind, failure.sequence = sequence;
    return failure;
  }
  return {FailureKind::kAborted, rank, kind, sequence,
          "rank " + std::to_string(rank) + " could not carry out " + name_of(kind) + " number " +
              std::to_string(sequence) + ": " + error.what()};
}

}  // namespace

Communicator::Communicator(std::unique_ptr<Group> group, std::shared_ptr<Progress> progress,
                           double timeout)
    : group_(std::move(group)),
      progress_(std::move(progress)),
      choices_(group_->world().size),
      timeout_(timeout),
      collectives_(queues_[0]) {}

Communicator::~Communicator() {
  if (!device_) return;
  if (forked())
    static_cast<void>(new std::shared_ptr<DeviceGroup>(std::move(device_)));  // the parent's
  else
    group_->leave(std::move(device_));  // peers may read of it still
}

Communicator::Queue& Communicator::queue_of(const Request& request) {
  if (!is_pair(request.kind)) return collectives_;
  const std::lock_guard lock(mutex_);
  return queues_[1 + request.root + (request.kind == OpKind::kRecv ? size() : 0)];
}

void Communicator::check_usable(const Request& request, const Queue& queue) const {
  const auto refuse = [&](FailureKind kind, const std::string& why) {
    throw CollectiveFailure({kind, rank(), request.kind, queue.sequence + 1,
                             std::string(name_of(request.kind)) + " refused: " + why});
  };
  if (closed_) refuse(FailureKind::kConfiguration, "this communicator is closed");
  learn_failure();
  if (failure_) refuse(failure_->kind, "this communicator failed before: " + failure_->message);
}

bool Communicator::heard_of_failure() const {
  const auto notice = group_->messenger() != nullptr ? group_->messenger()->notice() : nullptr;
  return notice && notice->reporter != rank();
}

void Communicator::learn_failure() const {
  if (closed_) return;  // the mailbox may serve another group by now
  if (failure_) return;
  const auto learn = [&](FailureKind kind, const std::string& report, int reporter) {
    failure_ = std::make_shared<Failure>(
        Failure{kind, rank(), OpKind::kBarrier, 0, reported_text(report, reporter, rank())});
  };
  const FailureRecord record = group_->failure();
  if (record.kind != FailureKind::kNone)
    return learn(record.kind, group_->report_of(record.reporter), group_->rank_of(record.reporter));
  if (group_->messenger() == nullptr) return;
  if (const auto notice = group_->messenger()->notice())
    learn(notice->kind, notice->report, notice->reporter);
}

void Communicator::run(const Request& given, const InterruptHook& interrupted) {
  if (forked()) throw_forked(given.kind, rank());
  validate(given, rank(), size());
  std::optional<Request> room_for_request;
  const Request& request = with_program(given, room_for_request, false);
  if (request.program && !request.device) Scheduled::require_room(*group_, request);
  const double timeout = request.timeout > 0 ? request.timeout : timeout_.load();
  Queue& queue = queue_of(request);
  std::shared_ptr<Pending> pending;
  std::uint64_t sequence = 0;
  {
    const std::lock_guard lock(mutex_);
    check_usable(request, queue);
    sequence = ++queue.sequence;
    if (queue.items.empty() && !queue.driven) {
      queue.driven = true;
    } else {
      pending = std::make_shared<Pending>(shared_from_this(), request, sequence, timeout, nullptr);
      queue.items.push_back(pending);
    }
  }
  if (pending) {
    progress_->carry_on(shared_from_this());
    // Returns or throws only once it is done: the caller's arrays are in use until then.
    pending->wait(0, interrupted);
    return;
  }
  AnyOperation room;
  Watch watch(timeout);
  try {
    Operation& operation = room.make(*group_, request, sequence);
    operation.start();
    drive(operation, watch, Clock::time_point::max(), interrupted);
  } catch (const std::exception& error) {
    const Failure failure = failure_from(error, request.kind, sequence, rank());
    fail(failure);
    room.end();  // while there is a group: others may close it from then on
    stop_driving(queue, Driver::kCaller);
    throw CollectiveFailure(failure);
  }
  room.end();
  stop_driving(queue, Driver::kCaller);
}

std::shared_ptr<Work> Communicator::submit(const Request& given,
                                           std::function<void(const Failure*)> on_done) {
  if (forked()) throw_forked(given.kind, rank());
  validate(given, rank(), size());
  std::optional<Request> room_for_request;
  const Request& request = with_program(given, room_for_request, true);
  if (request.program && !request.device) Scheduled::require_room(*group_, request);
  const double timeout = request.timeout > 0 ? request.timeout : timeout_.load();
  Queue& queue = queue_of(request);
  std::shared_ptr<Pending> pending;
  bool first = false;
  {
    const std::lock_guard lock(mutex_);
    check_usable(request, queue);
    pending = std::make_shared<Pending>(shared_from_this(), request, ++queue.sequence, timeout,
                                        std::move(on_done));
    first = queue.items.empty() && !queue.driven;
    queue.items.push_back(pending);
    if (first) {
      queue.driven = true;
      queue.driven_item = pending.get();
    }
  }
  // From here rather than from the progress thread: the peers see the call at once, and the last to
  // arrive with a small message is done without a change of threads. A large one moves over there.
  if (first)
    act_on_first(queue, *pending, Driver::kCaller, [&] {
      Operation& operation = pending->start();
      return operation.is_short() && operation.advance() == State::kDone;
    });
  else
    progress_->carry_on(shared_from_this());
  return pending;
}

template <class Act>
bool Communicator::act_on_first(Queue& queue, Pending& item, Driver driver, const Act& act) {
  Failure failure;
  try {
    const bool done = act();
    if (done)
      finish_first(queue, driver, nullptr);
    else
      stop_driving(queue, driver);
    return done;
  } catch (const std::exception& error) {
    failure = failure_from(error, item.request().kind, item.sequence(), rank());
  }
  fail(failure);
  finish_first(queue, driver, &failure);
  return true;
}

bool Communicator::drive(Operation& operation, Watch& watch, Clock::time_point until,
                         const InterruptHook& interrupted) {
  const Messenger* const messenger = group_->messenger();
  const bool rung = operation.must_poll() && messenger != nullptr && messenger->rings();
  const bool cheap = group_->may_spin() && !rung;  // what brings the message needs a core, too
  const int most_spins = cheap                            ? kSpinsWithCores
                         : operation.must_poll() && !rung ? kPollsCrowded
                                                          : kSpinsCrowded;
  auto yield_for = rung ? kYieldBeforeRing : kYieldFor;
  if (rung && !group_->may_spin()) yield_for = kYieldCrowded;
  int spins = 0;
  Clock::time_point sleep_from;
  for (;;) {
    State state = operation.advance();
    if (state == State::kDone) return true;
    // Also while there is progress: who waits for this thread after a failure waits for one chunk.
    Watch::throw_if_failed(operation);
    if (state == State::kProgressed) {
      spins = 0;
      continue;
    }
    if (++spins <= most_spins) {
      relax_core();
      continue;
    }
    const Clock::time_point now = Clock::now();
    if (spins == most_spins + 1) sleep_from = now + yield_for;
    if (now >= until) return false;
    if (now < sleep_from) {
      sched_yield();
      continue;
    }
    // Announce, look once more, then sleep: whoever publishes after this look sees us asleep.
    const std::uint32_t doorbell = group_->doorbell();
    group_->announce_sleep();
    state = operation.advance();
    if (state == State::kDone) return true;
    if (state == State::kProgressed) {
      spins = 0;
      continue;
    }
    Watch::throw_if_failed(operation);
    const bool unrung = operation.awaits_device() || (operation.must_poll() && !rung);
    const auto longest = unrung ? Clock::duration(kPollEvery) : Clock::duration(kLookEvery);
    group_->sleep(doorbell, std::min<Clock::duration>(longest, until - now));
    watch.look(operation);
    if (interrupted && interrupted())
      throw CollectiveFailure(
          {FailureKind::kAborted, rank(), operation.request().kind, operation.sequence(),
           "rank " + std::to_string(rank()) + " was interrupted in " + name_of(operation)});
  }
}

State Communicator::poll(bool look) {
  State result = State::kDone;
  Queue* queue = nullptr;
  awaits_device_ = false;
  if (device_) {
    watch_device(look);
    if (device_->under_way()) result = State::kBlocked;
  }
  for (auto next = queues_.begin();;) {  // the collectives' queue is always there
    std::shared_ptr<Pending> item;
    {
      const std::lock_guard lock(mutex_);
      while (next != queues_.end() && !next->second.waits()) ++next;
      if (next == queues_.end()) return result;
      queue = &(next++)->second;
      item = queue->items.front();
      queue->driven = true;
      queue->driven_item = item.get();
    }
    State state = State::kProgressed;
    act_on_first(*queue, *item, Driver::kProgressThread, [&] {
      Operation& operation = item->start();
      state = operation.advance();
      if (state == State::kDone) return true;
      Watch::throw_if_failed(operation);
      if (state == State::kBlocked && look) item->watch().look(operation);
      awaits_device_ |= operation.awaits_device();
      return false;
    });
    if (state != State::kBlocked)
      result = State::kProgressed;
    else if (result == State::kDone)
      result = State::kBlocked;
  }
}

bool Communicator::help(Pending& awaited, Clock::time_point until,
                        const InterruptHook& interrupted) {
  if (forked()) throw_forked(awaited.request().kind, rank());
  Queue& queue = queue_of(awaited.request());
  std::shared_ptr<Pending> item;
  {
    const std::lock_guard lock(mutex_);
    if (!queue.waits()) return false;
    item = queue.items.front();
    queue.driven = true;
    queue.driven_item = item.get();
  }
  return act_on_first(queue, *item, Driver::kCaller,
                      [&] { return drive(item->start(), item->watch(), until, interrupted); });
}

void Communicator::stop_driving(Queue& queue, Driver driver) {
  bool more = false;
  {
    const std::lock_guard lock(mutex_);
    queue.driven = false;
    queue.driven_item = nullptr;
    more = !queue.items.empty();
  }
  const bool watch = device_ && device_->wants_watch();
  if (watch || (more && driver == Driver::kCaller)) progress_->carry_on(shared_from_this());
}

void Communicator::finish_first(Queue& queue, Driver driver, const Failure* failure) {
  std::list<std::shared_ptr<Pending>> first;
  {
    const std::lock_guard lock(mutex_);
    first.splice(first.end(), queue.items, queue.items.begin());
    count_telling(*first.front());
  }
  stop_driving(queue, driver);
  end(first, failure);
}

void Communicator::end(const std::list<std::shared_ptr<Pending>>& items, const Failure* failure) {
  int told = 0;
  for (const std::shared_ptr<Pending>& item : items) {
    told += item->tells() ? 1 : 0;
    item->finish(failure);
  }
  if (told == 0) return;
  const std::lock_guard lock(mutex_);
  telling_ -= told;
}

void Communicator::fail(const Failure& failure) {
  bool tell = false;
  bool first = false;  // nobody has told this rank
  std::list<std::shared_ptr<Pending>> ended;
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    tell = group_->messenger() != nullptr && !failure_;
    first = tell && group_->failure().kind == FailureKind::kNone && !heard_of_failure();
    group_->fail(failure.kind, failure.message);
    if (!failure_) failure_ = std::make_shared<Failure>(failure);
    for (auto& [number, queue] : queues_) {
      auto first = queue.items.begin();
      if (first != queue.items.end() && first->get() == queue.driven_item) ++first;
      ended.splice(ended.end(), queue.items, first, queue.items.end());
    }
    for (const std::shared_ptr<Pending>& item : ended) count_telling(*item);
  }
  if (device_) device_->abort();
  if (tell) group_->messenger()->tell({failure.kind, rank(), failure.message}, first);
  end(ended, &failure);
}

void Communicator::abort(const std::string& reason) {
  if (forked()) return;
  fail({FailureKind::kAborted, rank(), OpKind::kBarrier, 0,
        "rank " + std::to_string(rank()) + " aborted the communicator: " + reason});
}

std::shared_ptr<const Failure> Communicator::failure() const {
  if (forked()) return nullptr;
  if (group_->messenger() != nullptr) group_->messenger()->poll();
  if (device_) const_cast<Communicator*>(this)->watch_device(false);
  const std::lock_guard lock(mutex_);
  learn_failure();
  return failure_;
}

}  // namespace pycollective
