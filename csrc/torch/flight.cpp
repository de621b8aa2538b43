#include "torch/flight.h"

#include <utility>

#include "torch/errors.h"

namespace pycollective::shim {
namespace {

// True while the core tells this thread that it is done, which it does between operations.
thread_local bool in_core = false;

}  // namespace

std::shared_ptr<Flight> Flight::start(Transfer transfer,
                                      std::shared_ptr<CompletionThreads> threads) {
  // Freeing a tensor can take the GIL, for which the core's thread must never wait.
  std::shared_ptr<Flight> flight(new Flight(std::move(transfer)), [](Flight* last) {
    if (!in_core) {
      delete last;
      return;
    }
    const std::shared_ptr<CompletionThreads> threads = last->threads_;
    threads->post([last] { delete last; });
  });
  threads->call_begins();
  flight->threads_ = std::move(threads);
  flight->outstanding_ = flight->transfer_.requests().size();
  flight->profile_ = flight->transfer_.profile();
  flight->profiled_ = flight->profile_ != nullptr;
  if (flight->profiled_) flight->profiler_ = c10::ThreadLocalDebugInfo::current();
  return flight;
}

std::shared_ptr<Flight> Flight::ended(Transfer transfer) {
  return std::shared_ptr<Flight>(new Flight(std::move(transfer)));
}

Flight::~Flight() {
  if (outstanding_ > 0) threads_->call_ends();  // it could not be issued
}

std::function<void(const Failure*)> Flight::on_done() {
  return [flight = shared_from_this()](const Failure* failure) mutable {
    in_core = true;
    flight->one_done(failure);
    flight.reset();
    in_core = false;
  };
}

// A profiler finds itself by what its thread has in thread-local memory, which the core's has not.
void Flight::end_profile() {
  if (!profile_) return;
  auto profiler = profiler_.lock();
  if (!profiler) profiler = std::make_shared<c10::ThreadLocalDebugInfo>();  // nor finds another
  const c10::DebugInfoGuard guard(std::move(profiler));
  profile_.reset();
}

void Flight::one_done(const Failure* failure) {
  bool completes = false;
  {
    const std::lock_guard lock(mutex_);
    if (failure != nullptr && !failure_) failure_ = *failure;
    if (--outstanding_ > 0) return;
    end_profile();
    const bool future_waits = future_ && !completed_;
    completes = future_waits || (!failure_ && transfer_.copies_back());
  }
  if (completes) threads_->post([flight = shared_from_this()] { flight->complete(); });
  threads_->call_ends();  // not before: in between nothing would seem to be under way
}

void Flight::complete() {
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
    land();
  } catch (const std::exception& error) {
    TORCH_WARN("pycollective ", transfer_.name(), ": results were not copied back: ", error.what());
  }
}

void Flight::land() {
  if (profiled_) {  // the core tells who waits before it tells us
    const std::lock_guard lock(mutex_);
    end_profile();
  }
  const std::lock_guard lock(landing_);
  if (std::exchange(landed_, true)) return;
  transfer_.copy_back();
}

c10::intrusive_ptr<Future> Flight::future(bool done, const Failure* failure) {
  {
    const std::lock_guard lock(mutex_);
    if (future_) return future_;
    future_ = c10::make_intrusive<Future>(c10::ListType::ofTensors());
    // Without the profiler, which this would keep beyond its stop; see profiler_.
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

void Flight::complete_future(Future& future, const Failure* failure) {
  const at::ThreadLocalStateGuard state(*futures_state_);
  if (failure != nullptr) {
    future.setError(typed_exception(*failure));
    return;
  }
  try {
    land();
  } catch (const std::exception&) {
    future.setError(std::current_exception());
    return;
  }
  future.markCompleted(transfer_.outputs());
}

}  // namespace pycollective::shim
