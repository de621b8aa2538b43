// What ranks compare of a call, and the error where they differ. On one host they compare in shared
// memory, in the barrier that every collective starts with; between hosts in messages
// (internode/messenger.h).
#pragma once

#include <cstring>
#include <string>

#include "engine/operations/operation.h"
#include "engine/task.h"
#include "shared_memory/layout.h"

namespace pycollective {

CallSignature signature_of(const Task& task);

inline bool agree(const CallSignature& a, const CallSignature& b) {
  return a.fields == b.fields && a.count == b.count && a.counts_hash == b.counts_hash &&
         a.deal == b.deal && std::memcmp(a.algorithm, b.algorithm, sizeof(a.algorithm)) == 0;
}

// The two sides of a message differ in kind and rank: they compare dtype and count.
bool agree_as_pair(const CallSignature& a, const CallSignature& b);

// A send or receive has its tag in the lower half of counts_hash. The upper half is for the data
// lane (operations/messages.h).
inline int tag_of(const CallSignature& called) {
  return static_cast<int>(static_cast<std::uint32_t>(called.counts_hash));
}

// In words: "all_reduce(float32, sum, count 10)". Another rank may have written anything.
std::string describe(const CallSignature& called);

// What one rank called and what another called instead, in words.
struct Mismatch {
  int rank;
  OpKind kind;
  std::uint64_t sequence;
  std::string mine;    // what was called
  std::string other;   // "rank 1 (pid 1234)"
  std::string theirs;  // what that one called
};
// Throws CollectiveFailure (kMismatch). `where`: which operation it was, and what has moved.
[[noreturn]] void throw_mismatch(const Mismatch& found, const std::string& where);
// The same for the two sides of a message.
[[noreturn]] void throw_pair_mismatch(const Request& mine, const Mismatch& found,
                                      const CallSignature& theirs, const std::string& where);

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
