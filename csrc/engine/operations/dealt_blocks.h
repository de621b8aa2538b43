// A reduction of nodes where every rank of the host has one, all of as many leaves, in rank order:
// the order over ranks is then the order over their leaves. So the direct paths add up the rows as
// they add up fp32 arrays, in place. What is left is done here, chunk by chunk: the division and
// the rounding into the output. An fp32 sum goes straight into the output.
#pragma once

#include <memory>

#include "engine/operations/operation.h"
#include "kernels/kernels.h"

namespace pycollective {

class AnyOperation;

class DealtBlocks final : public Operation {
 public:
  DealtBlocks(Group& group, const Task& task, std::uint64_t sequence);
  ~DealtBlocks() override;

  void start() override;
  State advance() override;
  bool is_short() const override;
  bool finished_by(Member member) const override;
  void compare_calls() const override;
  bool called_by(Member member) const override;
  bool is_over() const override { return summed_; }

 private:
  // The call on the rows, and where in the row the sums of this rank begin.
  void set_request();

  Request of_rows_;
  Task task_of_rows_;
  std::unique_ptr<AnyOperation> storage_;
  Operation* inner_ = nullptr;
  const float* sums_ = nullptr;  // null: they are where they belong
  std::size_t count_ = 0;        // of them
  CombineFn finish_;
  bool summed_ = false;
  std::size_t finished_ = 0;
};

}  // namespace pycollective
