#include "torch/async_call.h"

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

std::shared_ptr<AsyncCall> AsyncCall::finished(Transfer transfer) {
  return std::shared_ptr<AsyncCall>(new AsyncCall(std::move(transfer)));
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

}  // namespace pycollective::shim
