// A call that kernels carry out (device_group.h): the ranks arrive, then each launches, in the
// order of the calls on its stream (launch_order.h). If the caller gave the stream, the call is
// done then, and its result comes in that stream's order.
#pragma once

#include <chrono>

#include "engine/gpu/device_group.h"
#include "engine/gpu/launch_order.h"
#include "engine/operation.h"
#include "engine/operations/arrival.h"

namespace pycollective {

class OnDevice final : public Operation {
 public:
  OnDevice(Group& group, const Task& task, std::uint64_t sequence)
      : Operation(group, task, sequence), arrival_(group, task, sequence) {}

  ~OnDevice() override;

  void start() override {
    begin_ = std::chrono::steady_clock::now();
    arrival_.arrive();
  }
  State advance() override;
  bool is_short() const override { return true; }
  bool must_poll() const override { return awaits_device(); }
  bool awaits_device() const override { return launched_; }
  double grace() const override { return launched_ ? kGrace : 0; }
  std::string held_up() const override;
  // On the host. Communicator::watch_device() looks after what the device needs of it.
  bool finished_by(Member member) const override { return arrival_.arrived(member); }
  void compare_calls() const override { arrival_.compare_arrived(); }
  bool called_by(Member member) const override { return arrival_.arrived(member); }

 private:
  // The kernel's wait knows its GPU and its peer, so it should time out before the host's: here and
  // on ranks that have called a little earlier, also if cores are scarce.
  static constexpr double kGrace = 1;  // seconds

  double seconds_left() const;

  ArrivalBarrier arrival_;
  bool met_ = false;
  bool launched_ = false;
  std::chrono::steady_clock::time_point begin_{}, next_look_{};
};

}  // namespace pycollective
