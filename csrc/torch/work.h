// The c10d::Work of a call.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <memory>
#include <vector>

#include "engine/waiting_time.h"
#include "torch/async_call.h"

namespace pycollective::shim {

// Whether `work` ends before `time` is over; throws its failure. Several works may share `time`.
bool ends_in(WaitingTime& time, pycollective::Work& work, const InterruptHook& interrupted);

class Work final : public c10d::Work {
 public:
  // `cores`: the core's works, one a request; none for a finished call.
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

}  // namespace pycollective::shim
