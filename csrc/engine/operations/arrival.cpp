#include "engine/operations/arrival.h"

namespace pycollective {

ArrivalBarrier::ArrivalBarrier(Group& group, const Task& task, std::uint64_t sequence)
    : group_(group), sequence_(sequence), kind_(task.request->kind), mine_(signature_of(task)) {}

void ArrivalBarrier::arrive(std::uint64_t input) {
  Arrival& mine = line(group_.me());
  // Peers that wait look at this line all the time. A store of what it holds already would bring it
  // here, and they would take it away again before the number is stored.
  if (!agree(mine.called, mine_)) mine.called = mine_;
  if (mine.input != input) mine.input = input;
  group_.publish(mine.sequence, sequence_);
}

bool ArrivalBarrier::complete() {
  for (; next_ < group_.size(); ++next_) {
    if (!arrived(Member(next_))) return false;
    compare(Member(next_));
  }
  // The line of the next call is this core's to write by then: nobody looks at it any more.
  __builtin_prefetch(&group_.own().arrival[(sequence_ + 1) & 1], 1);
  return true;
}

void ArrivalBarrier::compare_arrived() const {
  for (int r = next_; r < group_.size(); ++r)
    if (arrived(Member(r))) compare(Member(r));
}

void ArrivalBarrier::compare(Member peer) const {
  if (!agree(line(peer).called, mine_)) throw_mismatch(peer);
}

void ArrivalBarrier::throw_mismatch(Member peer) const {
  pycollective::throw_mismatch(
      {group_.world().rank, kind_, sequence_, describe(mine_), group_.describe(peer),
       describe(line(peer).called)},
      "as operation number " + std::to_string(sequence_) + " of this communicator; no data moved");
}

}  // namespace pycollective
