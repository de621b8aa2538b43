// What the caller of an asynchronous collective holds.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <memory>
#include <vector>

#include "engine/waiting_time.h"
#include "torch/flight.h"

namespace pycollective::shim {

// Whether `work` ends before `time` is over, which several may share; throws its failure.
bool ends_in(WaitingTime& time, pycollective::Work& work, const InterruptHook& interrupted);

class Work final : public c10d::Work {
 public:
  // `cores`: the core's works, one a request; none for a call that has ended well.
  Work(int rank, c10d::OpType type, std::uint64_t sequence, std::shared_ptr<Flight> flight,
       std::vector<std::shared_ptr<pycollective::Work>> cores);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  std::vector<at::Tensor> result() override;
  // Of a recv that has ended well: the rank in the group that sent the message.
  int sourceRank() const override;
  void synchronize() override {}  // on a CPU, done is done
  // Not positive: no limit of its own. One that runs out raises CollectiveTimeout; the operation
  // goes on.
  bool wait(std::chrono::milliseconds timeout) override;
  void abort() override;
  c10::intrusive_ptr<Future> getFuture() override;
  std::uint64_t getSequencenumber() const override { return sequence_; }

 private:
  bool done() const;
  const Failure* failure() const;

  const std::uint64_t sequence_;
  const std::shared_ptr<Flight> flight_;
  const std::vector<std::shared_ptr<pycollective::Work>> cores_;
};

}  // namespace pycollective::shim
