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
  // Of all widths the best is taken: it is no worse than 14, nor than one for the widest gap,
  // behind which unary parts are 3 bits an index at most. Each block has a header, and ends in two
  // bytes.
  const std::uint64_t places = 15 * std::uint64_t{count} + size / 16384,
                      gaps = 35 * std::uint64_t{count};
  const std::uint64_t blocks = (std::uint64_t{count} + 127) / 128;
  return static_cast<std::size_t>(1 + 4 * blocks + (std::min(places, gaps) + 7) / 8);
}

}  // namespace pycollective
