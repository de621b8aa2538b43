// What copies cost, for benchmarks/copies.py.
#include <chrono>
#include <cstring>
#include <string>

#include "kernels/copy.h"

// Seconds of each of `times` copies of `kind`: "libc", "plain" or "streaming".
extern "C" __attribute__((visibility("default"))) double time_copies(const char* kind, void* to,
                                                                     const void* from,
                                                                     std::size_t bytes, int times) {
  using namespace pycollective;
  using Clock = std::chrono::steady_clock;
  const bool by_libc = kind == std::string("libc");
  const bool streams = kind == std::string("streaming");
  const auto begin = Clock::now();
  for (int i = 0; i < times; ++i) {
    if (by_libc) {
      std::memcpy(to, from, bytes);
    } else if (streams) {
      copy_streaming(to, from, bytes);
    } else {
      copy_bytes(to, from, bytes);
    }
    asm volatile("" : : "r"(to) : "memory");
  }
  finish_stores();
  return std::chrono::duration<double>(Clock::now() - begin).count() / times;
}
