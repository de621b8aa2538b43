// Copies in kernels: by as many bytes at a time as both sides are aligned alike.
#pragma once

#include "cuda/device.h"
#include "cuda/elements.h"
#include "cuda/share.h"

namespace pycollective::cuda {

// A T where it is aligned.
template <class T>
DEVICE void copy_one(char* to, const char* from) {
#if defined(__CUDACC__)
  *reinterpret_cast<T*>(to) = *reinterpret_cast<const T*>(from);
#else
  __builtin_memcpy(to, from, sizeof(T));
#endif
}

// `count` vectors.
DEVICE void copy_vectors(char* to, const char* from, std::uint64_t count, Share share) {
  using T = std::uint32_t;
  constexpr int kTogether = 8;  // loads on their way
  std::uint64_t i = share.index;
  for (; i + (kTogether - 1) * share.stride < count; i += kTogether * share.stride) {
    Lanes<T, kVectorLanes<T>> loaded[kTogether];
    UNROLL
    for (int k = 0; k < kTogether; ++k)
      loaded[k] = load_vector<T>(from + (i + k * share.stride) * kVectorBytes);
    UNROLL
    for (int k = 0; k < kTogether; ++k)
      store_vector<T>(to + (i + k * share.stride) * kVectorBytes, loaded[k]);
  }
  for (; i < count; i += share.stride)
    store_vector<T>(to + i * kVectorBytes, load_vector<T>(from + i * kVectorBytes));
}

// All but the vectors, which lie behind `before` bytes; T divides all of these numbers.
template <class T>
DEVICE void copy_rest(char* to, const char* from, std::uint64_t bytes, std::uint64_t before,
                      std::uint64_t in_vectors, Share share) {
  for (std::uint64_t i = share.index; i < (bytes - in_vectors) / sizeof(T); i += share.stride) {
    const std::uint64_t at = i * sizeof(T) + (i * sizeof(T) < before ? 0 : in_vectors);
    copy_one<T>(to + at, from + at);
  }
}

// `from` may be `to`; otherwise they do not overlap.
DEVICE void copy(char* to, const char* from, std::uint64_t bytes, Share share) {
  if (to == from) return;
  std::uint64_t before = bytes, in_vectors = 0;
  if ((address_of(to) ^ address_of(from)) % kVectorBytes == 0) {
    before = (kVectorBytes - address_of(to) % kVectorBytes) % kVectorBytes;
    if (before > bytes) before = bytes;
    in_vectors = (bytes - before) / kVectorBytes * kVectorBytes;
    copy_vectors(to + before, from + before, in_vectors / kVectorBytes, share);
  }
  const std::uint64_t aligned = address_of(to) | address_of(from) | bytes;
  if (aligned % 4 == 0) return copy_rest<std::uint32_t>(to, from, bytes, before, in_vectors, share);
  if (aligned % 2 == 0) return copy_rest<std::uint16_t>(to, from, bytes, before, in_vectors, share);
  copy_rest<std::uint8_t>(to, from, bytes, before, in_vectors, share);
}

}  // namespace pycollective::cuda
