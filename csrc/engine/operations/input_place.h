// Where a rank's input lies, as a word of its arrival line.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>

#include "engine/group.h"

namespace pycollective {

// The input lies in the rank's segment, at the offset in the other bits: peers map it.
constexpr std::uint64_t kInArray = std::uint64_t{1} << 63;
constexpr std::uint64_t kNotShared = 1;

constexpr bool is_in_array(std::uint64_t word) { return (word & kInArray) != 0; }

inline std::uint64_t word_of_array(const Group& group, const void* input, std::size_t bytes) {
  const auto offset = group.node().own()->segment().array_offset(input, bytes);
  return offset ? kInArray | *offset : kNotShared;
}

// The other way round, for a peer that has arrived. A peer may have written anything.
inline const std::byte* array_of(const Group& group, Member member, std::uint64_t word,
                                 std::size_t bytes) {
  const std::byte* found = group.find_array(member, word & ~kInArray, bytes);
  if (found == nullptr)
    throw std::runtime_error("the array of " + group.describe(member) +
                             " does not lie in its shared memory");
  return found;
}

}  // namespace pycollective
