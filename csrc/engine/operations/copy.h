// Moves bytes that may already be where they belong.
#pragma once

#include <cstddef>
#include <cstring>

namespace pycollective {

// memcpy that allows no bytes (then any pointers) and from == to (an operation in place).
inline void copy_bytes(void* to, const void* from, std::size_t bytes) {
  if (bytes != 0 && to != from) std::memcpy(to, from, bytes);
}

}  // namespace pycollective
