#include "engine/far_pair.h"

namespace pycollective {

FarPair::FarPair(Group& group, const Request& request, std::uint64_t sequence)
    : Operation(group, request, sequence), mine_(request, sequence) {}

FarPair::~FarPair() {
  std::vector<Link::Ticket> open;
  for (const Link::Ticket ticket : {call_, told_, data_})
    if (ticket != 0) open.push_back(ticket);
  if (!open.empty()) group_.link()->give_up(open);
}

void FarPair::start() {
  // Each direction of each pair has a tag of its own, so that both may be under way at once.
  const bool sends = request_.kind == OpKind::kSend;
  const int told = sends ? kTagPairCall : kTagPairAnswer;
  const int heard = sends ? kTagPairAnswer : kTagPairCall;
  call_ = group_.link()->irecv(request_.root, heard, &theirs_, sizeof(theirs_));
  told_ = group_.link()->isend(request_.root, told, &mine_, sizeof(mine_));
}

bool FarPair::finished(Link::Ticket& ticket) {
  if (ticket != 0 && group_.link()->done(ticket)) ticket = 0;
  return ticket == 0;
}

State FarPair::advance() {
  group_.link()->poll();
  if (!finished(call_)) return State::kBlocked;
  if (!moving_) {
    // The other side is called otherwise and has another root: all else must agree.
    if (theirs_.count != mine_.count ||
        (theirs_.signature >> 8 & 0xff) != (mine_.signature >> 8 & 0xff))
      throw CollectiveFailure(
          {FailureKind::kMismatch, group_.world().rank, request_.kind, sequence_,
           "rank " + std::to_string(group_.world().rank) + " called " + mine_.describe() +
               " and rank " + std::to_string(request_.root) + " called " + theirs_.describe() +
               " from one to the other; no data moved. Both must name the same dtype and count"});
    const std::size_t bytes = request_.count * size_of(request_.dtype);
    data_ = request_.kind == OpKind::kSend
                ? group_.link()->isend(request_.root, kTagPair, request_.input, bytes)
                : group_.link()->irecv(request_.root, kTagPair, request_.output, bytes);
    moving_ = true;
  }
  const bool told = finished(told_);
  return finished(data_) && told ? State::kDone : State::kBlocked;
}

std::string FarPair::far_absentees() const {
  return call_ != 0 ? std::to_string(request_.root) : std::string();
}

}  // namespace pycollective
