// Numbers on which a reduction in another order, or with another rounding, shows.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstring>
#include <random>
#include <vector>

#include "dtype.h"
#include "numerics.h"

namespace pycollective {

using Random = std::mt19937_64;
using Data = std::vector<std::byte>;

// A narrow float's bits; nothing of other types.
inline std::uint32_t narrowed(Dtype dtype, float value) {
  switch (dtype) {
#define PYCOLLECTIVE_CASE(X, numbers, type, ...)                                    \
  case Dtype::type:                                                                 \
    if constexpr (Numbers::numbers == Numbers::kFloat && size_of(Dtype::type) <= 2) \
      return rounded_to<Dtype::type, std::uint32_t>(value);                         \
    break;
    PYCOLLECTIVE_EACH_DTYPE(PYCOLLECTIVE_CASE, )
#undef PYCOLLECTIVE_CASE
  }
  return 0;
}

// An element whose sums depend on the order: magnitudes that differ, and cancel. Now and then any
// bits at all.
inline void write_element(const DtypeTraits& dtype, std::byte* to, Random& random) {
  const std::uint64_t bits = random();
  if (dtype.numbers == Numbers::kTruth) {
    *to = static_cast<std::byte>(bits & 1);
  } else if (dtype.numbers == Numbers::kInteger || bits % 16 == 0) {
    std::memcpy(to, &bits, dtype.size);
  } else {
    const double value = std::ldexp(static_cast<double>(bits >> 8 & 0xFFF) - 2048,
                                    static_cast<int>(bits >> 20 & 31) - 20);
    const auto single = static_cast<float>(value);
    const std::uint32_t narrow = narrowed(dtype.dtype, single);
    const void* const from = dtype.size == 8   ? static_cast<const void*>(&value)
                             : dtype.size == 4 ? static_cast<const void*>(&single)
                                               : static_cast<const void*>(&narrow);
    std::memcpy(to, from, dtype.size);
  }
}

}  // namespace pycollective
