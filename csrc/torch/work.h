// An asynchronous c10d call, and its c10d::Work.
#pragma once

#include <ATen/ThreadLocalState.h>
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "engine/waiting_time.h"
#include "torch/completion_threads.h"
#include "torch/transfer.h"

namespace pycollective::shim {

using Future = c10::ivalue::Future;

// An asynchronous c10d call: it keeps the tensors alive until the core is done with them, then
// copies results back and completes the future. Shared by the caller's Work and by the core,
// whichever needs it longer. Thread-safe.
class AsyncCall : public std::enable_shared_from_this<AsyncCall> {
 public:
  static std::shared_ptr<AsyncCall> start(Transfer transfer,
                                          std::shared_ptr<CompletionThreads> threads);
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
  std::shared_ptr<CompletionThreads> threads_;
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

// Whether `work` ends before `time` is over; throws its failure. Several works may share `time`.
bool ends_in(WaitingTime& time, pycollective::Work& work, const InterruptHook& interrupted);

class Work final : public c10d::Work {
 public:
  // `cores`: the core's works, one a request.
  Work(int rank, c10d::OpType type, std::uint64_t sequence, std::shared_ptr<AsyncCall> call,
       std::vector<std::shared_ptr<pycollective::Work>> cores);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  std::vector<at::Tensor> result() override;
  // The group's rank that sent the message of a finished recv.
  int sourceRank() const override;
  void synchronize() override {}  // on a CPU, done is done
  // Without a positive timeout it has no limit of its own. If the timeout runs out, it raises
  // CollectiveTimeout and the operation goes on.
  bool wait(std::chrono::milliseconds timeout) override;
  void abort() override;
  c10::intrusive_ptr<Future> getFuture() override;
  std::uint64_t getSequencenumber() const override { return sequence_; }

 private:
  bool done() const;
  const Failure* failure() const;

  const std::uint64_t sequence_;
  const std::shared_ptr<AsyncCall> call_;
  const std::vector<std::shared_ptr<pycollective::Work>> cores_;
};

// Of a synchronous call, which has succeeded; its results are in place.
class FinishedWork final : public c10d::Work {
 public:
  FinishedWork(int rank, c10d::OpType type, std::uint64_t sequence, std::vector<at::Tensor> outputs)
      : c10d::Work(rank, type), sequence_(sequence), outputs_(std::move(outputs)) {}

  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  std::vector<at::Tensor> result() override { return outputs_; }
  void synchronize() override {}
  bool wait(std::chrono::milliseconds timeout) override;
  void abort() override;
  c10::intrusive_ptr<Future> getFuture() override;
  std::uint64_t getSequencenumber() const override { return sequence_; }

 private:
  const std::uint64_t sequence_;
  const std::vector<at::Tensor> outputs_;
};

}  // namespace pycollective::shim
