// A reduction of nodes where every rank of the host has one, all of as many leaves, in rank order:
// the order over ranks is then the order over their leaves. So the direct paths add up the rows as
// they add up, and average, fp32 arrays: straight into an output of fp32, else in place. What is
// left is done here, chunk by chunk: the rounding into the output.
#pragma once

#include "engine/operations/direct_operation.h"
#include "kernels/kernels.h"

namespace pycollective {

class DealtBlocks final : public Operation {
 public:
  DealtBlocks(Group& group, const Task& task, std::uint64_t sequence);

  void start() override;
  State advance() override;
  bool is_short() const override;
  bool finished_by(Member member) const override;
  void compare_calls() const override;
  bool called_by(Member member) const override;
  bool is_over() const override { return reduced_; }

 private:
  // The call on the rows, and where in the row the results of this rank begin.
  void set_request();

  Request of_rows_;
  Task task_of_rows_;
  DirectOperation direct_;
  Operation* inner_ = nullptr;      // direct_'s
  const float* results_ = nullptr;  // null: they are where they belong
  std::size_t count_ = 0;           // of them
  CombineFn round_;
  bool reduced_ = false;
  std::size_t rounded_ = 0;
};

}  // namespace pycollective
