// Copies in kernels: by as many bytes at a time as both sides are aligned alike.
#pragma once

#include "cuda/device.h"
#include "cuda/elements.h"
#include "cuda/share.h"

namespace pycollective::cuda {

// `count` of T, of which both sides are aligned to `kWidth` bytes.
template <class T, int L>
DEVICE void copy_aligned(char* to, const char* from, std::uint64_t count, Share share) {
  constexpr std::uint64_t kWidth = sizeof(T) * L;
  constexpr int kTogether = L > 1 ? 8 : 4;  // loads on their way
  std::uint64_t i = share.index;
  for (; i + (kTogether - 1) * share.stride < count; i += kTogether * share.stride) {
    Lanes<T, L> loaded[kTogether];
    UNROLL
    for (int k = 0; k < kTogether; ++k)
      loaded[k] = load<T, L>(from + (i + k * share.stride) * kWidth);
    UNROLL
    for (int k = 0; k < kTogether; ++k)
      store<T, L>(to + (i + k * share.stride) * kWidth, loaded[k]);
  }
  for (; i < count; i += share.stride) store<T, L>(to + i * kWidth, load<T, L>(from + i * kWidth));
}

// Whole T's from the first boundary on; the bytes before it and behind the last by themselves.
template <class T, int L>
DEVICE void copy_by(char* to, const char* from, std::uint64_t bytes, Share share) {
  constexpr std::uint64_t kWidth = sizeof(T) * L;
  std::uint64_t before = (kWidth - address_of(to) % kWidth) % kWidth;
  if (before > bytes) before = bytes;
  const std::uint64_t whole = (bytes - before) / kWidth;
  copy_aligned<T, L>(to + before, from + before, whole, share);
  const std::uint64_t in_whole = whole * kWidth;
  for (std::uint64_t i = share.index; i < bytes - in_whole; i += share.stride) {
    const std::uint64_t at = i < before ? i : i + in_whole;
    to[at] = from[at];
  }
}

// `from` may be `to`; otherwise they do not overlap.
DEVICE void copy(char* to, const char* from, std::uint64_t bytes, Share share) {
  if (to == from) return;
  const std::uint64_t apart = address_of(to) ^ address_of(from);
  if (apart % kVectorBytes == 0) return copy_by<std::uint32_t, 4>(to, from, bytes, share);
  if (apart % 4 == 0) return copy_by<std::uint32_t, 1>(to, from, bytes, share);
  if (apart % 2 == 0) return copy_by<std::uint16_t, 1>(to, from, bytes, share);
  copy_by<std::uint8_t, 1>(to, from, bytes, share);
}

}  // namespace pycollective::cuda
