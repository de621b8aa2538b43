#include "engine/pending.h"

#include <algorithm>
#include <new>
#include <utility>

#include "engine/any_operation.h"
#include "engine/communicator.h"

namespace pycollective {
namespace {

constexpr double kForever = 1e9;  // seconds: longer than any run
// How often a thread looks while another one drives.
constexpr WaitingTime::Seconds kLookSoon{0.005};
constexpr WaitingTime::Seconds kLookSoonest{0.001};

}  // namespace

void throw_forked(OpKind kind, int rank) {
  throw CollectiveFailure(
      {FailureKind::kConfiguration, rank, kind, 0,
       std::string(name_of(kind)) +
           " refused: this process is a fork of the one that made the communicator, which works on "
           "unharmed. Make communicators after forking, or use the spawn start method"});
}

Pending::Pending(std::shared_ptr<Communicator> owner, const Task& task, std::uint64_t sequence,
                 double timeout, std::function<void(const Failure*)> on_done)
    : owner_(std::move(owner)),
      owner_rank_(owner_->rank()),
      request_(*task.request),
      task_(task.with(request_)),
      source_(request_.root),
      sequence_(sequence),
      watch_(timeout),
      on_done_(std::move(on_done)) {
  if (request_.root == kAnySource) request_.source = &source_;
}

Pending::~Pending() = default;

Operation& Pending::start() {
  if (operation_ == nullptr) {
    storage_ = std::make_unique<AnyOperation>();
    Operation& made = storage_->make(owner_->group(), task_, sequence_);
    made.start();
    operation_ = &made;
  }
  return *operation_;
}

// Also where there is no memory for the message: waiters must hear that it has ended.
void Pending::set_failure(const Failure& failure) {
  try {
    failure_ = failure;
  } catch (const std::bad_alloc&) {  // the text is short enough to need none
    failure_ = {failure.kind, failure.rank, failure.op, failure.sequence, "no memory left"};
  }
}

void Pending::finish(const Failure* failure) {
  std::shared_ptr<Communicator> owner;
  // Now, while there is a group: the caller may keep this object for longer.
  operation_ = nullptr;
  storage_.reset();
  request_.keep.reset();
  task_.staging.reset();
  task_.device.reset();
  {
    const std::lock_guard lock(mutex_);
    if (failure != nullptr) set_failure(*failure);
    owner = std::move(owner_);
    if (task_.launch_turn) {
      task_.launch_turn->pass();
      launch_ = request_.location.ends ? 0 : task_.launch_turn->launch();
      if (launch_ != 0) launcher_ = owner;
    }
    done_.store(true, std::memory_order_release);
  }
  changed_.notify_all();
  if (on_done_) std::exchange(on_done_, nullptr)(failure);
}

const Failure* Pending::failure() const { return done() && failure_ ? &*failure_ : nullptr; }

bool Pending::wait(double timeout, const InterruptHook& interrupted) {
  if (done()) return result();
  // Before the lock: in a fork, another thread of the parent may hold it for ever.
  if (guard_.forked()) throw_forked(request_.kind, owner_rank_);
  std::shared_ptr<Communicator> owner;
  {
    const std::lock_guard lock(mutex_);
    owner = owner_;
  }
  if (!owner) return result();
  owner->refuse_in_handler(request_.kind);
  WaitingTime time(timeout > 0 ? timeout : kForever);
  bool stopped = false;
  const InterruptHook stop = [&] { return !stopped && interrupted && (stopped = interrupted()); };
  while (!done()) {
    if (owner->help(*this, time, stop)) continue;
    if (time.is_over(Clock::now())) return done() && result();
    if (!stopped && owner->run_interrupt_hook(stop)) {
      stopped = true;
      owner->abort("interrupted");
      time = WaitingTime(kForever);  // not long: the driving thread sees the failure after a chunk
    }
    // Another thread drives the queue. It notifies when this operation is done, but may also stop
    // driving before: look again soon.
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, std::clamp(time.left(), kLookSoonest, kLookSoon),
                      [this] { return done(); });
  }
  owner->close_for_handler();
  result();
  if (stopped)
    throw CollectiveFailure({FailureKind::kAborted, owner_rank_, request_.kind, sequence_,
                             "interrupted while waiting"});
  return true;
}

Failure Pending::ran_out(double timeout) const {
  return {FailureKind::kTimeout, owner_rank_, request_.kind, sequence_,
          "wait timed out on rank " + std::to_string(owner_rank_) + " after its timeout of " +
              seconds_text(timeout) + "; " + name_of(request_.kind) + " number " +
              std::to_string(sequence_) + " goes on"};
}

bool Pending::result() const {
  if (failure_) throw CollectiveFailure(*failure_);
  const auto launcher = launcher_.lock();
  if (!launcher) return true;
  if (const auto since = launcher->failure_of(launch_))
    throw CollectiveFailure({since->kind, owner_rank_, request_.kind, sequence_, since->message});
  return true;
}

}  // namespace pycollective
