#include "bench/stream.h"

#include <chrono>

namespace pycollective {
namespace {

// A limit of memory must not be one of the compiler's baseline instruction set.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
__attribute__((target_clones("avx2", "default")))
#endif
void increment(std::uint8_t* bytes, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) bytes[i] = static_cast<std::uint8_t>(bytes[i] + 1);
}

}  // namespace

double stream_in_place(std::uint8_t* bytes, std::size_t count, int repetitions) {
  const auto start = std::chrono::steady_clock::now();
  for (int repetition = 0; repetition < repetitions; ++repetition) increment(bytes, count);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace pycollective
