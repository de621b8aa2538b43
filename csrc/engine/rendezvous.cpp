#include "engine/rendezvous.h"

#include <cstring>

#include "engine/program.h"

namespace pycollective {

Rendezvous::Rendezvous(Group& group, const Request& request, std::uint64_t sequence)
    : group_(group),
      sequence_(sequence),
      signature_(signature_of(request)),
      count_(request.counts.empty() ? request.count : 0),
      counts_hash_(hash_of(request.counts)) {
  if (request.program)
    std::memcpy(algorithm_, request.program->algorithm.data(), request.program->algorithm.size());
}

void Rendezvous::arrive() {
  Arrival& mine = line(group_.me());
  mine.signature = signature_;
  mine.count = count_;
  mine.counts_hash = counts_hash_;
  std::memcpy(mine.algorithm, algorithm_, sizeof(algorithm_));
  group_.publish(mine.sequence, sequence_);
}

bool Rendezvous::complete() {
  for (; next_ < group_.size(); ++next_) {
    if (!arrived(Member(next_))) return false;
    compare(Member(next_));
  }
  return true;
}

void Rendezvous::compare_arrived() const {
  for (int r = next_; r < group_.size(); ++r)
    if (arrived(Member(r))) compare(Member(r));
}

void Rendezvous::compare(Member peer) const {
  const Arrival& theirs = line(peer);
  if (theirs.signature != signature_ || theirs.count != count_ ||
      theirs.counts_hash != counts_hash_ ||
      std::memcmp(theirs.algorithm, algorithm_, sizeof(algorithm_)) != 0)
    throw_mismatch(peer);
}

void Rendezvous::throw_mismatch(Member peer) const {
  const Arrival& theirs = line(peer);
  throw CollectiveFailure(
      {FailureKind::kMismatch, group_.world().rank, static_cast<OpKind>(signature_ & 0xff),
       sequence_,
       "rank " + std::to_string(group_.world().rank) + " called " +
           describe_call(signature_, count_, counts_hash_, algorithm_) + " and " +
           group_.describe(peer) + " called " +
           describe_call(theirs.signature, theirs.count, theirs.counts_hash, theirs.algorithm) +
           " as operation number " + std::to_string(sequence_) +
           " of this communicator; no data moved. Every rank must make the same calls in the same "
           "order, with the same dtype, count, operation, root and algorithm"});
}

}  // namespace pycollective
