#include "engine/operations/any_source.h"

#include <utility>

namespace pycollective {

ReceiveAny::ReceiveAny(Group& group, const Task& task, std::uint64_t sequence)
    : Operation(group, task, sequence), named_(*task.request), named_task_(named_) {}

ReceiveAny::~ReceiveAny() { stop_awaiting(); }

void ReceiveAny::stop_awaiting() {
  if (std::exchange(awaits_, false)) group_.messenger()->await_anyone(false);
}

void ReceiveAny::start() {
  if (group_.messenger() == nullptr) return;
  group_.messages().internode().hear_anyone(group_.messenger()->ranks());
  group_.messenger()->await_anyone(true);
  awaits_ = true;
}

std::optional<State> ReceiveAny::try_rank(int rank, bool& kept) {
  if (rank == group_.world().rank || !group_.messages().may_take(task_, rank)) return std::nullopt;
  const std::optional<Member> member = group_.member_of(rank);
  named_.root = rank;
  if (!member) {
    if (!group_.messages().internode().expect_if_there(rank, request_.tag, kept))
      return std::nullopt;
    found_ = &receive_.emplace<InternodePair>(group_, named_task_, sequence_, true);
    found_->start();
    return found_->advance();
  }
  if (!Receive::is_there(group_, *member, request_.tag)) return std::nullopt;
  Receive& receive = receive_.emplace<Receive>(group_, named_task_, sequence_);
  const State state = receive.advance();
  if (receive.has_begun()) {
    found_ = &receive;
    return state;
  }
  receive_.emplace<std::monostate>();  // another thread's receive has taken it
  return std::nullopt;
}

std::optional<State> ReceiveAny::find(bool& kept) {
  if (group_.messenger() != nullptr) group_.messenger()->poll();
  // From the rank after the last one served, so that none waits for ever.
  const int ranks = group_.world().size;
  const int first = group_.messages().next_source();
  for (int i = 0; i < ranks; ++i)
    if (const auto state = try_rank((first + i) % ranks, kept)) return state;
  return std::nullopt;
}

State ReceiveAny::advance() {
  State state = State::kBlocked;
  bool kept = false;
  if (found_ != nullptr) {
    state = found_->advance();
  } else if (const auto begun = find(kept)) {
    stop_awaiting();
    group_.messages().set_next_source((named_.root + 1) % group_.world().size);
    if (request_.source != nullptr) *request_.source = named_.root;
    state = *begun;
  } else if (group_.messages().closes()) {
    const std::string rank = std::to_string(group_.world().rank);
    throw EndedByClose({FailureKind::kAborted, group_.world().rank, request_.kind, sequence_,
                        "recv number " + std::to_string(sequence_) + " on rank " + rank +
                            ": rank " + rank + " closed its communicator before a message came"});
  } else if (kept) {
    state = State::kProgressed;
  }
  return state;
}

bool ReceiveAny::somebody_is_there() const {
  for (const Member each : group_.members())
    if (each != group_.me() && !group_.has_left(each)) return true;
  return group_.messenger() != nullptr && group_.messenger()->anyone_is_there();
}

void ReceiveAny::compare_calls() const {
  if (found_ != nullptr) return found_->compare_calls();
  if (somebody_is_there()) return;
  throw CollectiveFailure(
      {FailureKind::kPeerFailure, group_.world().rank, request_.kind, sequence_,
       "recv number " + std::to_string(sequence_) + " on rank " +
           std::to_string(group_.world().rank) +
           ": all other ranks closed their communicators, and none has sent it a message"});
}

bool ReceiveAny::finished_by(Member member) const {
  return found_ != nullptr ? found_->finished_by(member) : group_.has_left(member);
}

bool ReceiveAny::called_by(Member member) const {
  return found_ != nullptr && found_->called_by(member);
}

std::string ReceiveAny::internode_absentees() const {
  if (found_ != nullptr) return found_->internode_absentees();
  if (group_.messenger() == nullptr) return {};
  std::string ranks;
  for (const int rank : group_.messenger()->ranks())
    ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
  return ranks;
}

std::set<int> ReceiveAny::internode_unfinished() const {
  return found_ != nullptr ? found_->internode_unfinished() : std::set<int>();
}

}  // namespace pycollective
