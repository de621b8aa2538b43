// An asynchronous c10d call: it keeps the tensors alive until the core is done with them, then
// copies results back and completes the future.
#pragma once

#include <ATen/ThreadLocalState.h>
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <functional>
#include <memory>
#include <mutex>
#include <optional>

#include "torch/completion_threads.h"
#include "torch/transfer.h"

namespace pycollective::shim {

using Future = c10::ivalue::Future;

// Shared by the caller's Work and by the core, whichever needs it longer. Thread-safe.
class AsyncCall : public std::enable_shared_from_this<AsyncCall> {
 public:
  static std::shared_ptr<AsyncCall> start(Transfer transfer,
                                          std::shared_ptr<CompletionThreads> threads);
  // A call that has succeeded; its results are in place.
  static std::shared_ptr<AsyncCall> finished(Transfer transfer);
  ~AsyncCall();

  // The core calls it once for each request.
  std::function<void(const Failure*)> on_done();

  const Transfer& transfer() const { return transfer_; }

  // Copies staged results to the caller's tensors, once. Every request must have succeeded.
  void copy_back();

  // Makes the future at the first call. If the core is `done`, completes it here, with its
  // `failure` if any; else a completion thread does.
  c10::intrusive_ptr<Future> future(bool done, const Failure* failure);

 private:
  explicit AsyncCall(Transfer transfer) : transfer_(std::move(transfer)) {}

  void one_done(const Failure* failure);
  // The caller holds mutex_.
  void end_profile();
  // Runs on a completion thread: copies back, and completes the future if there is one.
  void complete();
  void complete_future(Future& future, const Failure* failure);

  Transfer transfer_;
  std::shared_ptr<CompletionThreads> threads_;  // null for a finished call
  std::mutex mutex_;
  std::size_t outstanding_ = 0;  // requests
  std::optional<Failure> failure_;
  std::unique_ptr<at::RecordFunction> profile_;
  bool profiled_ = false;  // set by start(); read without mutex_
  // Weak: a profiler that has stopped has freed the event that profile_ would write to.
  std::weak_ptr<c10::ThreadLocalDebugInfo> profiler_;
  c10::intrusive_ptr<Future> future_;
  std::optional<at::ThreadLocalState> futures_state_;  // grad mode etc. for callbacks
  bool completed_ = false;                             // future_ is completed, or about to be

  std::mutex copying_;
  bool copied_back_ = false;
};

}  // namespace pycollective::shim
