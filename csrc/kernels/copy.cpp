// Copies, plain and past the caches, of one instruction set: compiled once for each (levels.h).
//
// 1. The head, up to the first line of the destination.
// 2. Blocks of four lines: all loads, then all stores, each within a line. A load waits for an
//    earlier store of the same page offset, so they are kept apart.
// 3. The tail, below a block.
#include "kernels/copy.h"

#include <cstdint>

namespace pycollective::PYCOLLECTIVE_LEVEL {
namespace {

// Vectors of 64 bytes are no faster where the source is not aligned, and each load takes two lines.
constexpr std::size_t kCopyVector = kVectorBytes < 32 ? kVectorBytes : 32;
typedef long long CopyVector __attribute__((vector_size(kCopyVector)));

struct PlainStore {
  static void store(std::byte* to, CopyVector value) {
    *static_cast<CopyVector*>(__builtin_assume_aligned(to, kCopyVector)) = value;
  }
};

struct StreamingStore {
  static void store(std::byte* to, CopyVector value) {
#if defined(__AVX2__)
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to), (__m256i)value);
#elif defined(__SSE2__)
    _mm_stream_si128(reinterpret_cast<__m128i*>(to), (__m128i)value);
#else
    PlainStore::store(to, value);
#endif
  }
};

template <class Store>
void copy_lines(void* to, const void* from, std::size_t bytes) {
#if defined(__SANITIZE_THREAD__)
  std::memcpy(to, from, bytes);  // ThreadSanitizer sees no streaming stores
#else
  constexpr std::size_t kLine = 64, kBlock = 4 * kLine, kVectors = kBlock / kCopyVector;
  auto* target = static_cast<std::byte*>(to);
  const auto* source = static_cast<const std::byte*>(from);
  const std::size_t past = reinterpret_cast<std::uintptr_t>(to) % kLine;
  const std::size_t to_line = past == 0 ? 0 : kLine - past;
  const std::size_t head = to_line < bytes ? to_line : bytes;
  if (head != 0) std::memcpy(target, source, head);
  std::size_t at = head;
  for (; at + kBlock <= bytes; at += kBlock) {
    CopyVector values[kVectors];
    for (std::size_t i = 0; i < kVectors; ++i)
      std::memcpy(&values[i], source + at + i * kCopyVector, kCopyVector);
    asm volatile("" ::: "memory");  // no store goes before the last load
    for (std::size_t i = 0; i < kVectors; ++i)
      Store::store(target + at + i * kCopyVector, values[i]);
  }
  if (at != bytes) std::memcpy(target + at, source + at, bytes - at);
#endif
}

}  // namespace

Copies find_copies() { return {copy_lines<PlainStore>, copy_lines<StreamingStore>}; }

}  // namespace pycollective::PYCOLLECTIVE_LEVEL
