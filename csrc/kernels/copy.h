// Copies of data whose cost does not depend on where the two arrays lie.
//
// libc's does: on AMD's Zen 3 and 4 it takes `rep movsb` from 2 KiB on, which goes byte by byte
// where the destination lies a little behind the source modulo a page (glibc bug 30994), as NumPy's
// arrays do. docs/inside/architecture.md has what either costs.
#pragma once

#include <cstddef>
#include <cstring>

#include "kernels/levels.h"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace pycollective {

using CopyFn = void (*)(void* to, const void* from, std::size_t bytes);

// Both copy as memcpy does. A flag announces what `streaming` has copied only if finish_stores()
// comes between: it writes past the caches, with no need to own the lines first. Where the CPU
// cannot, it is `plain`.
struct Copies {
  CopyFn plain;
  CopyFn streaming;
};

PYCOLLECTIVE_OF_EACH_LEVEL(Copies find_copies())

inline Copies find_copies(SimdLevel level) { return PYCOLLECTIVE_AT_LEVEL(level, find_copies()); }

inline const Copies& active_copies() {
  static const Copies copies = find_copies(active_simd_level());
  return copies;
}

// memcpy that allows zero bytes (then any pointers) and from == to (an operation in place).
inline void copy_bytes(void* to, const void* from, std::size_t bytes) {
  constexpr std::size_t kMostByLibc = 1024;  // it is as fast up to there, at any address
  if (bytes == 0 || to == from) return;
  if (bytes <= kMostByLibc) {
    std::memcpy(to, from, bytes);
  } else {
    active_copies().plain(to, from, bytes);
  }
}

inline void copy_streaming(void* to, const void* from, std::size_t bytes) {
  active_copies().streaming(to, from, bytes);
}

// Streaming stores before it are seen before any store behind it.
inline void finish_stores() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace pycollective
