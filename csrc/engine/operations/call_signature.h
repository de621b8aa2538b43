// What a rank called, in the words that ranks compare: on a host in shared memory (rendezvous.h),
// between hosts in messages (far/call_note.h). And what all are told where they differ.
#pragma once

#include <cstring>
#include <string>

#include "engine/task.h"
#include "shared_memory/layout.h"

namespace pycollective {

CallSignature signature_of(const Task& task);

inline bool agree(const CallSignature& a, const CallSignature& b) {
  return a.fields == b.fields && a.count == b.count && a.counts_hash == b.counts_hash &&
         std::memcmp(a.algorithm, b.algorithm, sizeof(a.algorithm)) == 0;
}

// Two sides of a message are called otherwise and name other ranks: this is what they compare.
bool agree_as_pair(const CallSignature& a, const CallSignature& b);

// Of a send or a receive: its tag stands where collectives have a hash, beside 32 bits that are
// the messages' own (far/pair_calls.h).
inline int tag_of(const CallSignature& called) {
  return static_cast<int>(static_cast<std::uint32_t>(called.counts_hash));
}

// For a user: "all_reduce(float32, sum, count 10)". What another rank wrote may be broken.
std::string describe(const CallSignature& called);

// One rank's operation and what another did instead, in words.
struct Mismatch {
  int rank;
  OpKind kind;
  std::uint64_t sequence;
  std::string mine;    // what was called
  std::string other;   // "rank 1 (pid 1234)"
  std::string theirs;  // what that one called
};
// `where`: which operation it was, and what has moved. Throws CollectiveFailure (kMismatch).
[[noreturn]] void throw_mismatch(const Mismatch& found, const std::string& where);
// The same for the two sides of a message.
[[noreturn]] void throw_pair_mismatch(const Request& mine, const Mismatch& found,
                                      const CallSignature& theirs, const std::string& where);

}  // namespace pycollective
