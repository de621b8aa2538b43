// all_to_all_v: a send and a receive for each other rank, all at once, after the ranks of the host
// have arrived and agreed that it is one. Only the two ranks of a message know its count; they
// compare it before data move. Empty messages go, too.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine/operation.h"
#include "engine/operations/arrival.h"

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
  std::vector<std::unique_ptr<Operation>> parts_;  // those that are not done
};

}  // namespace pycollective
