#include "torch/work.h"

#include <algorithm>
#include <string>
#include <utility>

#include "torch/errors.h"

namespace pycollective::shim {
namespace {

// True while the core runs on_done() on this thread.
thread_local bool in_core = false;

}  // namespace

std::shared_ptr<AsyncCall> AsyncCall::start(Transfer transfer,
                                            std::shared_ptr<CompletionThreads> threads) {
  // Freeing a tensor can take the GIL, for which the core's thread must never wait.
  std::shared_ptr<AsyncCall> call(new AsyncCall(std::move(transfer)), [](AsyncCall* last) {
    if (!in_core) {
      delete last;
      return;
    }
    const std::shared_ptr<CompletionThreads> threads = last->threads_;
    threads->post([last] { delete last; });
  });
  threads->call_begins();
  call->threads_ = std::move(threads);
  call->outstanding_ = call->transfer_.requests().size();
  call->profile_ = call->transfer_.profile();
  call->profiled_ = call->profile_ != nullptr;
  if (call->profiled_) call->profiler_ = c10::ThreadLocalDebugInfo::current();
  return call;
}

AsyncCall::~AsyncCall() {
  if (outstanding_ > 0) threads_->call_ends();  // a request was not issued
}

std::function<void(const Failure*)> AsyncCall::on_done() {
  return [call = shared_from_this()](const Failure* failure) mutable {
    in_core = true;
    call->one_done(failure);
    call.reset();
    in_core = false;
  };
}

// A profiler finds its state in thread-local memory, which the core's thread has not.
void AsyncCall::end_profile() {
  if (!profile_) return;
  auto profiler = profiler_.lock();
  if (!profiler) profiler = std::make_shared<c10::ThreadLocalDebugInfo>();  // find no other
  const c10::DebugInfoGuard guard(std::move(profiler));
  profile_.reset();
}

void AsyncCall::one_done(const Failure* failure) {
  bool completes = false;
  {
    const std::lock_guard lock(mutex_);
    if (failure != nullptr && !failure_) failure_ = *failure;
    if (--outstanding_ > 0) return;
    end_profile();
    const bool future_waits = future_ && !completed_;
    completes = future_waits || (!failure_ && transfer_.copies_back());
  }
  if (completes) threads_->post([call = shared_from_this()] { call->complete(); });
  threads_->call_ends();  // last: else any_busy() could miss the posted task
}

void AsyncCall::complete() {
  c10::intrusive_ptr<Future> future;
  {
    const std::lock_guard lock(mutex_);
    if (!completed_) future = future_;
    completed_ = completed_ || future;
  }
  if (future) {
    complete_future(*future, failure_ ? &*failure_ : nullptr);
    return;
  }
  try {
    copy_back();
  } catch (const std::exception& error) {
    TORCH_WARN("pycollective ", transfer_.name(), ": results were not copied back: ", error.what());
  }
}

void AsyncCall::copy_back() {
  if (profiled_) {  // a waiter may come here before one_done()
    const std::lock_guard lock(mutex_);
    end_profile();
  }
  const std::lock_guard lock(copying_);
  if (std::exchange(copied_back_, true)) return;
  transfer_.copy_back();
}

c10::intrusive_ptr<Future> AsyncCall::future(bool done, const Failure* failure) {
  {
    const std::lock_guard lock(mutex_);
    if (future_) return future_;
    future_ = c10::make_intrusive<Future>(c10::ListType::ofTensors());
    // Leaves out the profiler, which this state would keep alive after its stop.
    const c10::DebugInfoGuard unprofiled(std::make_shared<c10::ThreadLocalDebugInfo>());
    futures_state_.emplace();
    if (outstanding_ == 0) {
      done = true;
      failure = failure_ ? &*failure_ : nullptr;
    }
    if (!done) return future_;
    completed_ = true;
  }
  complete_future(*future_, failure);
  return future_;
}

void AsyncCall::complete_future(Future& future, const Failure* failure) {
  const at::ThreadLocalStateGuard state(*futures_state_);
  if (failure != nullptr) {
    future.setError(typed_exception(*failure));
    return;
  }
  try {
    copy_back();
  } catch (const std::exception&) {
    future.setError(std::current_exception());
    return;
  }
  future.markCompleted(transfer_.outputs());
}

bool ends_in(WaitingTime& time, pycollective::Work& work, const InterruptHook& interrupted) {
  constexpr double kBetweenLooks = 0.01;  // seconds
  while (!work.wait(std::clamp(time.left().count(), 1e-9, kBetweenLooks), interrupted))
    if (time.is_over(Clock::now())) return false;
  return true;
}

Work::Work(int rank, c10d::OpType type, std::uint64_t sequence, std::shared_ptr<AsyncCall> call,
           std::vector<std::shared_ptr<pycollective::Work>> cores)
    : c10d::Work(rank, type),
      sequence_(sequence),
      call_(std::move(call)),
      cores_(std::move(cores)) {}

bool Work::done() const {
  return std::all_of(cores_.begin(), cores_.end(), [](const auto& core) { return core->done(); });
}

const Failure* Work::failure() const {
  for (const auto& core : cores_)
    if (const Failure* failure = core->failure()) return failure;
  return nullptr;
}

bool Work::isCompleted() {
  if (!done()) return false;
  if (failure() == nullptr) call_->copy_back();
  return true;
}

bool Work::isSuccess() const { return done() && failure() == nullptr; }

std::exception_ptr Work::exception() const {
  const Failure* failure = done() ? this->failure() : nullptr;
  return failure != nullptr ? typed_exception(*failure) : nullptr;
}

std::vector<at::Tensor> Work::result() { return call_->transfer().outputs(); }

int Work::sourceRank() const {
  const auto& requests = call_->transfer().requests();
  TORCH_CHECK(requests.size() == 1 && cores_.size() == 1 && requests.front().kind == OpKind::kRecv,
              call_->transfer().name(), ": only what was received has a source rank");
  const int rank = cores_.front()->source();
  TORCH_CHECK(rank >= 0, "recv: the source is known once the message has come");
  return rank;
}

bool Work::wait(std::chrono::milliseconds timeout) {
  WaitingTime time(WaitingTime::Seconds(timeout).count());  // one for all
  typed([&](const InterruptHook& interrupted) {
    for (const auto& core : cores_) {
      if (timeout.count() > 0 ? ends_in(time, *core, interrupted) : core->wait(0, interrupted))
        continue;
      const Transfer& transfer = call_->transfer();
      throw CollectiveFailure(
          {FailureKind::kTimeout, rank_, transfer.requests().front().kind, sequence_,
           std::string(transfer.name()) + ": wait timed out after its timeout of " +
               std::to_string(timeout.count()) + " ms; the operation goes on"});
    }
  });
  call_->copy_back();
  return true;
}

void Work::abort() {
  TORCH_CHECK_NOT_IMPLEMENTED(false, call_->transfer().name(),
                              ": a single operation cannot be aborted; abort its process group");
}

c10::intrusive_ptr<Future> Work::getFuture() {
  const bool done = this->done();
  return call_->future(done, done ? failure() : nullptr);
}

bool FinishedWork::wait(std::chrono::milliseconds) {
  const StopsAtExit stops;
  return true;
}

void FinishedWork::abort() {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "a synchronous call is over: abort its process group");
}

c10::intrusive_ptr<Future> FinishedWork::getFuture() {
  auto future = c10::make_intrusive<Future>(c10::ListType::ofTensors());
  future->markCompleted(outputs_);
  return future;
}

}  // namespace pycollective::shim
