#include "engine/communicator.h"

#include <sched.h>

#include <algorithm>
#include <new>
#include <utility>

#include "engine/internode/messenger.h"
#include "engine/internode/pair.h"
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
      choices_(group_->world().size),
      timeout_(timeout) {
  group_->messages().set_turns(this);
}

Communicator::~Communicator() {
  if (!device_) return;
  if (forked()) {
    static_cast<void>(new std::shared_ptr<DeviceGroup>(std::move(device_)));  // the parent's
    return;
  }
  DeviceGroup::give_back_blocks(device_);
  group_->leave();  // which keeps it: peers may read of it still
}

const Request& Communicator::with_turn(const Request& request, std::optional<Request>& room) {
  if (!queues_.has_turns(request)) return request;
  if (!room) room.emplace(request);
  room->turn = queues_.next_turn();
  return *room;
}

bool Communicator::has_come(const Request& request, int source) const {
  const std::lock_guard lock(mutex_);
  return queues_.has_come(request, source);
}

void Communicator::check_usable(std::unique_lock<std::mutex>& lock, Queue& queue,
                                const Request& request) {
  const auto refuse = [&](FailureKind kind, const std::string& why) {
    const std::uint64_t sequence = queues_.sequence_of(queue) + 1;
    queues_.let_go(queue);
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

std::uint64_t Communicator::next_number(Queue& queue, const Request& request) {
  const std::uint64_t number = ++queues_.sequence_of(queue);
  if (request.launch_turn)
    request.launch_turn->take(progress_->launch_order(), {request.kind, number, weak_from_this()});
  if (request.kind != OpKind::kSend || request.tag < 0) return number;
  Messages& messages = group_->messages();
  if (const auto peer = group_->member_of(request.root))
    messages.to(*peer).order.call(request.tag, number);
  else if (FarPair::needs_lane(request))
    messages.far().order(request.root).call(request.tag, number);
  return number;
}

void Communicator::require_memory(const Request& request) {
  if (request.program && !request.device) Scheduled::require_room(*group_, request);
  if (request.kind == OpKind::kSend || request.exchange) require_channel_room(request);
}

void Communicator::run(const Request& given, const InterruptHook& interrupted) {
  if (forked()) throw_forked(given.kind, rank());
  refuse_in_handler(given.kind);
  validate(given, rank(), size());
  std::optional<Request> room_for_request;
  const Request& programmed = with_program(given, room_for_request, false);
  require_memory(programmed);
  const double timeout = programmed.timeout > 0 ? programmed.timeout : timeout_.load();
  std::unique_lock lock(mutex_);
  Queue& queue = queues_.of(programmed);
  check_usable(lock, queue, programmed);
  const Request& request = with_turn(programmed, room_for_request);
  const std::uint64_t sequence = next_number(queue, programmed);
  std::shared_ptr<Pending> pending;
  if (queue.items.empty() && !queue.driven) {
    queue.driven = true;
    queue.call_turn = request.turn;
  } else {
    pending = std::make_shared<Pending>(shared_from_this(), request, sequence, timeout, nullptr);
    queue.items.push_back(pending);
  }
  lock.unlock();
  if (pending) {
    progress_->carry_on(shared_from_this());
    // Returns or throws only once it is done: the caller's arrays are in use until then.
    pending->wait(0, interrupted);
    if (request.source != nullptr) *request.source = pending->source();
    return;
  }
  AnyOperation room;
  Watch watch(timeout);
  try {
    Operation& operation = room.make(*group_, request, sequence);
    operation.start();
    drive(operation, watch, nullptr, interrupted);
  } catch (const std::exception& error) {
    const Failure failure = failure_from(error, request.kind, sequence, rank());
    if (fails_group(error)) fail(failure);
    room.end();  // while there is a group: others may close it from then on
    stop_driving(queue, Driver::kCaller, true);
    close_for_handler();
    throw CollectiveFailure(failure);
  }
  room.end();
  stop_driving(queue, Driver::kCaller, true);
}

std::shared_ptr<Work> Communicator::submit(const Request& given,
                                           std::function<void(const Failure*)> on_done) {
  if (forked()) throw_forked(given.kind, rank());
  refuse_in_handler(given.kind);
  validate(given, rank(), size());
  std::optional<Request> room_for_request;
  const Request& programmed = with_program(given, room_for_request, true);
  require_memory(programmed);
  const double timeout = programmed.timeout > 0 ? programmed.timeout : timeout_.load();
  std::unique_lock lock(mutex_);
  Queue& queue = queues_.of(programmed);
  check_usable(lock, queue, programmed);
  const auto pending =
      std::make_shared<Pending>(shared_from_this(), with_turn(programmed, room_for_request),
                                next_number(queue, programmed), timeout, std::move(on_done));
  const bool first = queue.items.empty() && !queue.driven;
  queue.items.push_back(pending);
  if (first) {
    queue.driven = true;
    queue.driven_item = pending.get();
  }
  lock.unlock();
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
  bool fails = true;
  try {
    const bool done = act();
    if (done)
      finish_first(queue, driver, nullptr);
    else
      stop_driving(queue, driver, false);
    return done;
  } catch (const std::exception& error) {
    failure = failure_from(error, item.request().kind, item.sequence(), rank());
    fails = fails_group(error);
  }
  if (fails) fail(failure);
  finish_first(queue, driver, &failure);
  return true;
}

bool Communicator::drive(Operation& operation, Watch& watch, WaitingTime* time,
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
    if (time != nullptr && time->is_over(now)) return false;
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
    // Where no other thread does it. A peer may wait for another of this rank's operations, and
    // only then go on with this one; calls of other
    // communicators may be launched before it.
    bool device = operation.awaits_device();
    if (!progress_->runs()) {
      state = drive_each(true, device);
      for (const auto& each : progress_->launch_order()->communicators())
        if (each->drive_each(true, device) == State::kProgressed) state = State::kProgressed;
      if (state == State::kProgressed) {
        spins = 0;
        continue;
      }
    }
    const bool unrung = device || (operation.must_poll() && !rung);
    WaitingTime::Seconds longest = unrung ? WaitingTime::Seconds(kPollEvery) : kLookEvery;
    if (time != nullptr) longest = std::min(longest, time->left());
    group_->sleep(doorbell, std::chrono::duration_cast<std::chrono::nanoseconds>(longest));
    Sight sight(*group_);
    watch.look(operation, sight);
    if (!interrupts(interrupted)) continue;
    Watch::throw_if_failed(operation);
    throw CollectiveFailure(
        {FailureKind::kAborted, rank(), operation.request().kind, operation.sequence(),
         "rank " + std::to_string(rank()) + " was interrupted in " + name_of(operation)});
  }
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
  for (std::uint64_t key = 0;;) {
    std::shared_ptr<Pending> item;
    {
      const std::lock_guard lock(mutex_);
      queue = queues_.first_waiting(key);
      if (queue == nullptr) return result;
      key = queue->key + 1;
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
      if (state == State::kBlocked && look) item->watch().look(operation, *sight);
      awaits_device |= operation.awaits_device();
      return false;
    });
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
    queues_.let_go(queue);
    return false;
  }
  const std::shared_ptr<Pending> item = queue.items.front();
  queue.driven = true;
  queue.driven_item = item.get();
  lock.unlock();
  return act_on_first(queue, *item, Driver::kCaller,
                      [&] { return drive(item->start(), item->watch(), &time, interrupted); });
}

void Communicator::stop_driving(Queue& queue, Driver driver, bool ended) {
  bool more = false;
  bool others_wait = false;
  {
    const std::lock_guard lock(mutex_);
    queue.driven = false;
    queue.driven_item = nullptr;
    more = !queue.items.empty();
    others_wait = ended && queues_.gives_turns(queue);
    queues_.let_go(queue);
  }
  // Receives whose turn has come.
  if (others_wait) group_->ring_own();
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
  stop_driving(queue, driver, true);
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

}  // namespace pycollective
