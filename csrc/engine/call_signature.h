// What ranks compare of a call, and the error where they differ. On one host they compare in shared
// memory, in the barrier that every collective starts with; between hosts in messages
// (internode/messenger.h).
#pragma once

#include <cstdint>
#include <cstring>
#include <iterator>
#include <string>

#include "engine/task.h"
#include "shared_memory/layout.h"

namespace pycollective {

CallSignature signature_of(const Task& task);

inline bool agree(const CallSignature& a, const CallSignature& b) {
  std::uint64_t one[sizeof(CallSignature) / 8], other[sizeof(CallSignature) / 8], differ = 0;
  std::memcpy(one, &a, sizeof(a));
  std::memcpy(other, &b, sizeof(b));
  for (std::size_t i = 0; i < std::size(one); ++i) differ |= one[i] ^ other[i];
  return differ == 0;
}

// The two sides of a message differ in kind and rank: they compare dtype and count.
bool agree_as_pair(const CallSignature& a, const CallSignature& b);

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
