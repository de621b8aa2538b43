// A call under way: what must live until the core is done with it, and what happens then.
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
class Flight : public std::enable_shared_from_this<Flight> {
 public:
  static std::shared_ptr<Flight> start(Transfer transfer,
                                       std::shared_ptr<CompletionThreads> threads);
  // Of a call that has ended well, and whose results are in place.
  static std::shared_ptr<Flight> ended(Transfer transfer);
  ~Flight();

  // For the core, once for each request.
  std::function<void(const Failure*)> on_done();

  const Transfer& transfer() const { return transfer_; }

  // Puts staged results where they belong, once; only after every request has succeeded.
  void land();

  // Made at the first call. Completed here if the core is `done`, with its `failure` if any; else
  // on a completion thread.
  c10::intrusive_ptr<Future> future(bool done, const Failure* failure);

 private:
  explicit Flight(Transfer transfer) : transfer_(std::move(transfer)) {}

  void one_done(const Failure* failure);
  // Under mutex_.
  void end_profile();
  // On a completion thread: lands, and completes the future if there is one.
  void complete();
  void complete_future(Future& future, const Failure* failure);

  Transfer transfer_;
  std::shared_ptr<CompletionThreads> threads_;  // none for a call that has ended
  std::mutex mutex_;
  std::size_t outstanding_ = 0;  // requests
  std::optional<Failure> failure_;
  std::unique_ptr<at::RecordFunction> profile_;
  bool profiled_ = false;  // from the start; may be read without mutex_
  // Weak, because one that has stopped has freed the event that profile_ would write to.
  std::weak_ptr<c10::ThreadLocalDebugInfo> profiler_;
  c10::intrusive_ptr<Future> future_;
  std::optional<at::ThreadLocalState> futures_state_;  // grad mode and the like, for its callbacks
  bool completed_ = false;                             // someone completes, or completed, future_

  std::mutex landing_;
  bool landed_ = false;
};

}  // namespace pycollective::shim
