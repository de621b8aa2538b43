// A call on a GPU's memory by way of the host: the input is copied to pinned memory, any other
// operation moves it there, and the output is copied back. What peers see is a call like any other,
// so ranks of one group may have theirs on GPUs or on the host, each as it likes.
//
// A call of m bytes each way: m from the device, what the operation costs, m to the device, one
// after the other. The copy to the host is handed over at the call (Communicator::with_program), on
// a stream that waits for the caller's. Done means that the result is in the device's memory:
// nothing of the call is left on any stream.
#pragma once

#include <memory>

#include "engine/operations/operation.h"

namespace pycollective {

class AnyOperation;

// The memory and the copies of one call. `request` is validated and on a device; throws
// CollectiveFailure (kConfiguration), cuda::DriverError, with nothing moved.
std::shared_ptr<cuda::Staging> stage(const Request& request, int rank, int ranks);

class Staged final : public Operation {
 public:
  Staged(Group& group, const Task& task, std::uint64_t sequence);
  ~Staged() override;

  void start() override {}  // the copy is on its way
  State advance() override;
  bool finished_by(Member member) const override;
  void compare_calls() const override;
  std::string internode_absentees() const override;
  std::set<int> internode_unfinished() const override;
  bool must_poll() const override;
  bool called_by(Member member) const override;
  std::string held_up() const override;
  bool awaits_device() const override { return step_ != Step::kMoving; }
  bool is_over() const override { return step_ == Step::kToDevice; }

 private:
  enum class Step { kToHost, kMoving, kToDevice };

  Request on_host_;
  Task task_on_host_;
  std::unique_ptr<AnyOperation> room_;
  Operation* inner_ = nullptr;
  Step step_ = Step::kToHost;
};

}  // namespace pycollective
