#include "engine/operations/all_to_all_v.h"

#include <algorithm>

#include "engine/operations/internode_pair.h"
#include "engine/operations/point_to_point.h"
#include "engine/shards.h"

namespace pycollective {

AllToAllV::AllToAllV(Group& group, const Task& task, std::uint64_t sequence)
    : Operation(group, task, sequence), arrival_(group, task, sequence) {}

void AllToAllV::add(OpKind kind, int peer) {
  const AllToAllVPart& what = (*request_.all_to_all_v)[static_cast<std::size_t>(peer)];
  const bool sends = kind == OpKind::kSend;
  Request& request = requests_.emplace_back();
  request.kind = kind;
  request.dtype = request_.dtype;
  request.root = peer;
  request.tag = kAllToAllVTag;
  request.input = sends ? what.input : nullptr;
  request.output = sends ? nullptr : what.output;
  request.count = sends ? what.send_count : what.recv_count;
  request.keep = request_.keep;
  const Task& task = tasks_.emplace_back(request);
  if (!group_.member_of(peer))
    parts_.push_back(std::make_unique<InternodePair>(group_, task, sequence_));
  else if (sends)
    parts_.push_back(std::make_unique<Send>(group_, task, sequence_));
  else
    parts_.push_back(std::make_unique<Receive>(group_, task, sequence_));
}

void AllToAllV::begin() {
  const int ranks = group_.world().size;
  const int me = group_.world().rank;
  const AllToAllVPart& own = (*request_.all_to_all_v)[static_cast<std::size_t>(me)];
  if (own.output != own.input)
    copy_bytes(own.output, own.input, own.send_count * size_of(request_.dtype));
  requests_.reserve(2 * static_cast<std::size_t>(ranks));  // parts refer to them
  tasks_.reserve(requests_.capacity());
  // Each rank begins with its neighbours, so that not all begin with the same rank.
  for (int i = 1; i < ranks; ++i) {
    add(OpKind::kSend, (me + i) % ranks);
    add(OpKind::kRecv, (me + ranks - i) % ranks);
  }
  for (const auto& part : parts_) part->start();
}

State AllToAllV::advance() {
  if (!met_) {
    if (!arrival_.complete()) return State::kBlocked;
    met_ = true;
    begin();
  }
  State result = State::kBlocked;
  const auto is_done = [&](const std::unique_ptr<Operation>& part) {
    const State state = part->advance();
    if (state != State::kBlocked) result = State::kProgressed;
    return state == State::kDone;
  };
  parts_.erase(std::remove_if(parts_.begin(), parts_.end(), is_done), parts_.end());
  return parts_.empty() ? State::kDone : result;
}

bool AllToAllV::finished_by(Member member) const {
  return met_ && std::all_of(parts_.begin(), parts_.end(),
                             [&](const auto& part) { return part->finished_by(member); });
}

void AllToAllV::compare_calls() const {
  if (!met_) arrival_.compare_arrived();
  Messenger* const messenger = group_.messenger();
  if (messenger == nullptr) return;
  // Ranks of other hosts may have called something else, with other messages.
  const NumberedCall mine{sequence_, signature_of(task_)};
  if (const auto other = messenger->find_other_call(mine))
    throw_mismatch({group_.world().rank, request_.kind, sequence_, mine.describe(),
                    "rank " + std::to_string(other->first), other->second.describe()},
                   "of this communicator; no data moved between the two");
  if (!std::exchange(reminded_, true)) messenger->remind(messenger->ranks(), mine);
}

std::string AllToAllV::internode_absentees() const {
  std::string ranks;
  for (const auto& part : parts_)
    if (part->request().kind == OpKind::kRecv && !part->internode_absentees().empty())
      ranks += (ranks.empty() ? "" : ", ") + part->internode_absentees();
  return ranks;
}

std::set<int> AllToAllV::internode_unfinished() const {
  std::set<int> ranks;
  for (const auto& part : parts_) ranks.merge(part->internode_unfinished());
  return ranks;
}

}  // namespace pycollective
