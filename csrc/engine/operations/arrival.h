// The barrier that every collective of a host starts with.
#pragma once

#include "engine/call_signature.h"
#include "engine/operation.h"

namespace pycollective {

// All ranks of the host arrive, and each checks that all have called the same.
class ArrivalBarrier {
 public:
  ArrivalBarrier(Group& group, const Task& task, std::uint64_t sequence);

  // Tells the peers what this rank has called. They may read what it wrote before, and `input`.
  void arrive(std::uint64_t input = 0);
  // Whether all have arrived. Throws CollectiveFailure (kMismatch) at the first that differs, on
  // every rank, before any output is written.
  bool complete();
  // Compares those that have arrived, while another rank keeps all waiting.
  void compare_arrived() const;
  // What a member that has arrived gave to arrive().
  std::uint64_t input_of(Member member) const { return line(member).input; }
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
