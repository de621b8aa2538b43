#include "engine/far_rendezvous.h"

#include <cstring>

#include "engine/program.h"

namespace pycollective {

CallNote::CallNote(const Request& request, std::uint64_t number)
    : sequence(number),
      signature(signature_of(request)),
      count(request.counts.empty() ? request.count : 0),
      counts_hash(hash_of(request.counts)) {
  if (request.program)
    std::memcpy(algorithm, request.program->algorithm.data(), request.program->algorithm.size());
}

bool CallNote::agrees(const CallNote& other) const {
  return sequence == other.sequence && signature == other.signature && count == other.count &&
         counts_hash == other.counts_hash &&
         std::memcmp(algorithm, other.algorithm, sizeof(algorithm)) == 0;
}

std::string CallNote::describe() const {
  return describe_call(signature, count, counts_hash, algorithm) + " as number " +
         std::to_string(sequence);
}

FarRendezvous::FarRendezvous(Group& group, const Request& request, std::uint64_t sequence,
                             const std::vector<std::int32_t>& peers)
    : group_(group), request_(request), peers_(peers), mine_(request, sequence) {}

FarRendezvous::~FarRendezvous() {
  std::vector<Link::Ticket> open;
  for (const auto* tickets : {&receives_, &sends_})
    for (const Link::Ticket ticket : *tickets)
      if (ticket != 0) open.push_back(ticket);
  if (!open.empty()) group_.link()->give_up(open);
}

void FarRendezvous::arrive() {
  theirs_.resize(peers_.size());
  for (std::size_t i = 0; i < peers_.size(); ++i)
    receives_.push_back(group_.link()->irecv(peers_[i], kTagCall, &theirs_[i], sizeof(theirs_[i])));
  for (const std::int32_t peer : peers_)
    sends_.push_back(group_.link()->isend(peer, kTagCall, &mine_, sizeof(mine_)));
}

bool FarRendezvous::complete() {
  bool all = true;
  for (std::size_t i = 0; i < receives_.size(); ++i) {
    if (receives_[i] == 0) continue;
    if (!group_.link()->done(receives_[i])) {
      all = false;
      continue;
    }
    receives_[i] = 0;
    if (theirs_[i].agrees(mine_)) continue;
    throw CollectiveFailure(
        {FailureKind::kMismatch, group_.world().rank, request_.kind, mine_.sequence,
         "rank " + std::to_string(group_.world().rank) + " called " + mine_.describe() +
             " and rank " + std::to_string(peers_[i]) + " called " + theirs_[i].describe() +
             " of this communicator; no data moved between the two. Every rank must make the same "
             "calls in the same order, with the same dtype, count, operation, root and algorithm"});
  }
  for (Link::Ticket& ticket : sends_) {
    if (ticket != 0 && group_.link()->done(ticket)) ticket = 0;
    all = all && ticket == 0;
  }
  return all;
}

std::string FarRendezvous::absentees() const {
  std::string ranks;
  for (std::size_t i = 0; i < receives_.size(); ++i)
    if (receives_[i] != 0) ranks += (ranks.empty() ? "" : ", ") + std::to_string(peers_[i]);
  return ranks;
}

}  // namespace pycollective
