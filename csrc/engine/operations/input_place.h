// Where a rank's input lies, as a word of its arrival line: an address in its process, or one of
// these. A peer may have written anything.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>

#include "engine/group.h"

namespace pycollective {

// It lies in the rank's segment, at the offset in the other bits: its peers map it.
constexpr std::uint64_t kInSharedArray = std::uint64_t{1} << 63;
// Beside the place: this rank may not read some peer's process.
constexpr std::uint64_t kMayNotRead = std::uint64_t{1} << 62;
// Beside rank 0's: what lies in processes' own memory goes through slots.
constexpr std::uint64_t kThroughSlots = std::uint64_t{1} << 61;
constexpr std::uint64_t kMarks = kMayNotRead | kThroughSlots;
constexpr std::uint64_t kUnreadable = 1;  // peers cannot read it, or must not in this call
constexpr std::uint64_t kNoInput = 2;
constexpr std::uint64_t kInSmallBuffer = 3;  // the rank has copied it there, as OneShot does

constexpr bool in_shared_array(std::uint64_t word) { return (word & kInSharedArray) != 0; }

// The place of an input that lies in an array; else kUnreadable.
inline std::uint64_t place_in_array(const Group& group, const void* input, std::size_t bytes) {
  const auto offset = group.node().own()->segment().array_offset(input, bytes);
  return offset ? kInSharedArray | *offset : kUnreadable;
}

// A part of a peer's input that lies in an array, where this process maps it.
inline const std::byte* find_in_array(const Group& group, Member member, std::uint64_t word,
                                      std::size_t skip, std::size_t bytes) {
  const std::uint64_t offset = word & ~(kInSharedArray | kMarks);
  const std::byte* found = group.find_array(member, offset + skip, bytes);
  if (found == nullptr)
    throw std::runtime_error("the array of " + group.describe(member) +
                             " does not lie in its shared memory");
  return found;
}

}  // namespace pycollective
