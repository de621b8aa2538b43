// recv from any rank: looks for a message of its tag at all, and receives the first.
#pragma once

#include <optional>
#include <string>
#include <variant>

#include "engine/internode/pair.h"
#include "engine/operations/point_to_point.h"

namespace pycollective {

// Of one that its own rank's close() ends: nothing of the group has failed.
class EndedByClose final : public CollectiveFailure {
 public:
  using CollectiveFailure::CollectiveFailure;
};

class ReceiveAny final : public Operation {
 public:
  ReceiveAny(Group& group, const Task& task, std::uint64_t sequence);
  ~ReceiveAny() override;

  void start() override;
  State advance() override;
  void compare_calls() const override;
  bool finished_by(Member member) const override;
  bool called_by(Member member) const override;
  std::string internode_absentees() const override;
  std::set<int> internode_unfinished() const override;
  bool must_poll() const override { return group_.messenger() != nullptr; }

 private:
  // What came of the first advance() of the receive that has a message; none where nobody has.
  // `kept` as PairCalls::take() has it.
  std::optional<State> find(bool& kept);
  std::optional<State> try_rank(int rank, bool& kept);
  void stop_awaiting();
  // Whether a rank can still send: one that has closed its communicator cannot.
  bool somebody_is_there() const;

  Request named_;  // the request, once it is known whose message it takes
  Task named_task_;
  std::variant<std::monostate, Receive, InternodePair> room_;
  Operation* found_ = nullptr;
  bool awaits_ = false;
};

}  // namespace pycollective
