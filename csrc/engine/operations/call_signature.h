// What ranks compare of a call: on one host in shared memory (arrival.h), between hosts in messages
// (internode/message_buffer.h). And the error where they differ.
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

// The two sides of a message differ in kind and rank: they compare dtype and count.
bool agree_as_pair(const CallSignature& a, const CallSignature& b);

// A send or receive has its tag in the lower half of counts_hash. The upper half is for the data
// lane (internode/pair_calls.h).
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

}  // namespace pycollective
