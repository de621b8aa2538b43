// A call on a GPU's arrays by way of the host: the input is copied to pinned memory, another
// operation works there, and the output is copied back. Peers see a call like any other, so ranks
// of one group may each have their arrays on a GPU or on the host.
//
// A call costs one copy from the device, the operation, and one copy to the device, one after the
// other. The copy to the host starts at the call (Communicator::fill_in), on a stream that waits
// for the caller's. Done means that the result is in the device's memory: nothing of the call is
// left on any stream.
#pragma once

#include <memory>

#include "engine/operations/host_operation.h"

namespace pycollective {

// Starts the copy to the host for a valid request on a device. Throws CollectiveFailure
// (kConfiguration), cuda::DriverError, before anything has moved.
std::shared_ptr<cuda::Staging> stage(const Request& request, int rank, int ranks);

class Staged final : public Operation {
 public:
  Staged(Group& group, const Task& task, std::uint64_t sequence);

  void start() override {}  // the copy is under way
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
  HostOperation on_host_operation_;
  Operation* inner_ = nullptr;  // on_host_operation_'s
  Step step_ = Step::kToHost;
};

}  // namespace pycollective
