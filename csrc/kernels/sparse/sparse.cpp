#include "kernels/sparse/sparse.h"

#include <algorithm>

#include "kernels/sparse/sparse_levels.h"

namespace pycollective {

Sparse find_sparse(SimdLevel level) {
#if defined(__x86_64__)
  if (level == SimdLevel::kAvx512) return avx512::find_sparse();
  if (level == SimdLevel::kAvx2) return avx2::find_sparse();
#else
  (void)level;
#endif
  return portable::find_sparse();
}

std::size_t packed_indices_bound(std::size_t count, std::uint64_t size) {
  // The shorter way is taken. A block's gaps take at most 32 bits each, and 3 in unary.
  const std::size_t blocks = (count + 127) / 128;
  const std::uint64_t gaps = 2 * blocks + 4 * count + 3 * count / 8 + 2 * blocks;
  const std::uint64_t offsets = 4 * ((size + 65535) / 65536) + 2 * std::uint64_t{count};
  return static_cast<std::size_t>(1 + std::min(gaps, offsets));
}

}  // namespace pycollective
