// The start of every collective: all ranks arrive, and all see that they called the same thing.
#pragma once

#include "engine/operations/call_signature.h"
#include "engine/operations/operation.h"

namespace pycollective {

class ArrivalBarrier {
 public:
  ArrivalBarrier(Group& group, const Task& task, std::uint64_t sequence);

  // Tells the peers what this rank called. Whatever it wrote before is theirs to read.
  void arrive();
  // Whether all have arrived. Throws CollectiveFailure (kMismatch) at the first that differs, on
  // every rank, before anything moved.
  bool complete();
  // The same for those that have arrived while another keeps all waiting.
  void compare_arrived() const;
  bool arrived(Member member) const {
    return line(member).sequence.load(std::memory_order_acquire) >= sequence_;
  }

 private:
  Arrival& line(Member member) const { return group_.mailbox(member).arrival[sequence_ & 1]; }
  void compare(Member peer) const;
  [[noreturn]] void throw_mismatch(Member peer) const;

  Group& group_;
  std::uint64_t sequence_;
  OpKind kind_;
  CallSignature mine_;
  int next_ = 0;  // members below have arrived and agree
};

}  // namespace pycollective
