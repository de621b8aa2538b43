// The uneven all-to-all: a message for each pair of ranks, all at once, after the ranks of the host
// have met and agree that it is one. How much goes from one to another only these two know, and
// they compare it before it moves; the empty ones go too.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine/operations/arrival.h"
#include "engine/operations/operation.h"

namespace pycollective {

class AllToAllV final : public Operation {
 public:
  AllToAllV(Group& group, const Task& task, std::uint64_t sequence);

  void start() override { arrival_.arrive(); }
  State advance() override;
  bool finished_by(Member member) const override;
  bool called_by(Member member) const override { return arrival_.arrived(member); }
  void compare_calls() const override;
  std::string internode_absentees() const override;
  std::set<int> internode_unfinished() const override;
  bool must_poll() const override { return group_.messenger() != nullptr; }

 private:
  void begin();
  void add(OpKind kind, int peer);

  ArrivalBarrier arrival_;
  bool met_ = false;
  mutable bool reminded_ = false;
  std::vector<Request> requests_;
  std::vector<Task> tasks_;
  std::vector<std::unique_ptr<Operation>> parts_;  // that are not done
};

}  // namespace pycollective
