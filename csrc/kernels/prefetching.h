// A copy that prefetches what is read next: the waits for both then overlap.
#pragma once

#include <algorithm>
#include <cstddef>

#include "kernels/copy.h"

namespace pycollective {

// What a rank will read next of its own memory.
struct NextRead {
  const std::byte* data = nullptr;
  std::size_t bytes = 0;
};

// Calls copy(to, from, bytes): in small blocks where something is read next, of which it prefetches
// as much into the second-level cache.
template <class Copy>
void copy_prefetching(Copy copy, std::byte* to, const std::byte* from, std::size_t bytes,
                      NextRead next) {
  constexpr std::size_t kCacheLine = 64;
  const std::size_t block = next.bytes != 0 ? 16 * kCacheLine : bytes;
  for (std::size_t at = 0; at < bytes; at += block) {
    const std::size_t end = std::min(at + block, bytes);
    for (std::size_t line = at; line < std::min(end, next.bytes); line += kCacheLine)
      __builtin_prefetch(next.data + line, 0, 2);
    copy(to + at, from + at, end - at);
  }
}

// A copy that peers read: a flag may follow at once. `streams`: past the caches.
inline void copy_for_peers(bool streams, std::byte* to, const std::byte* from, std::size_t bytes,
                           NextRead next = {}) {
  if (!streams) return copy_prefetching(copy_bytes, to, from, bytes, next);
  copy_prefetching(copy_streaming, to, from, bytes, next);
  finish_stores();
}

}  // namespace pycollective
