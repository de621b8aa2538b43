// Streaming (non-temporal) stores: past the caches, with no need to own the lines first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace pycollective {

// Copies as memcpy does. A flag announces the data only if finish_stores() comes between. Where the
// CPU has no such stores, and under ThreadSanitizer, which does not see them, it is memcpy.
inline void copy_streaming(void* to, const void* from, std::size_t bytes) {
  std::size_t done = 0;
#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__)
  if (reinterpret_cast<std::uintptr_t>(to) % sizeof(__m128i) == 0) {
    auto* target = static_cast<__m128i*>(to);
    const auto* source = static_cast<const __m128i*>(from);
    // Whole lines at a time: they leave together.
    for (; done + 64 <= bytes; done += 64, target += 4, source += 4) {
      _mm_stream_si128(target, _mm_loadu_si128(source));
      _mm_stream_si128(target + 1, _mm_loadu_si128(source + 1));
      _mm_stream_si128(target + 2, _mm_loadu_si128(source + 2));
      _mm_stream_si128(target + 3, _mm_loadu_si128(source + 3));
    }
  }
#endif
  if (done != bytes)
    std::memcpy(static_cast<std::byte*>(to) + done, static_cast<const std::byte*>(from) + done,
                bytes - done);
}

// The same, four pages at a time: of memory that lies in no cache a core fetches more from four
// streams at once than from one (at 64 MiB an all-gather of shared arrays takes a quarter less).
inline void copy_streaming_pages(void* to, const void* from, std::size_t bytes) {
  constexpr std::size_t kCacheLine = 64;
  constexpr std::size_t kStream = 4096;
  constexpr std::size_t kAtOnce = 4 * kStream;
  auto* target = static_cast<std::byte*>(to);
  const auto* source = static_cast<const std::byte*>(from);
  std::size_t done = 0;
  for (; done + kAtOnce <= bytes; done += kAtOnce)
    for (std::size_t line = done; line < done + kStream; line += kCacheLine)
      for (std::size_t at = line; at < line + kAtOnce; at += kStream)
        copy_streaming(target + at, source + at, kCacheLine);
  copy_streaming(target + done, source + done, bytes - done);
}

// Streaming stores before it are seen before any store behind it.
inline void finish_stores() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace pycollective
