// recv from any rank: looks for a message with its tag at all ranks, and receives the first.
#pragma once

#include <optional>
#include <string>
#include <variant>

#include "engine/internode/pair.h"
#include "engine/operations/point_to_point.h"

namespace pycollective {

// The error of a receive that its own rank's close() ends. The group has not failed.
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
  // Begins to receive the first message there is; returns what the first advance() did, or null
  // where no rank has sent one. `kept`: as in PairCalls::take().
  std::optional<State> find(bool& kept);
  std::optional<State> try_rank(int rank, bool& kept);
  void stop_awaiting();
  // Whether any rank can still send: one that has closed its communicator cannot.
  bool somebody_is_there() const;

  Request named_;  // the request with the rank whose message it takes
  Task named_task_;
  std::variant<std::monostate, Receive, InternodePair> receive_;
  Operation* found_ = nullptr;
  bool awaits_ = false;
};

}  // namespace pycollective
