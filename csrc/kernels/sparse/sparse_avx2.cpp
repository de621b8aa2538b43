// Top-k selection and sparse sums for CPUs with AVX2 and F16C.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>

#include "kernels/sparse/sparse_levels.h"
#include "numerics.h"

namespace pycollective::avx2 {
namespace {
constexpr int kVectorBytes = 32;
// clang-format off: each needs those before it
#include "kernels/sparse/elements.h"
#include "kernels/sparse/vectors.h"
#include "kernels/sparse/steps.h"
#include "kernels/sparse/threshold.h"
#include "kernels/sparse/scan.h"
#include "kernels/sparse/top_k.h"
#include "kernels/sparse/gaps.h"
#include "kernels/sparse/indices.h"
#include "kernels/sparse/sums.h"
// clang-format on
}  // namespace

Sparse find_sparse() {
  return {add,       top_k,   top_k_chunks, histogram,      select, take,
          all_below, ascends, pack_indices, unpack_indices, sum,    scatter};
}

}  // namespace pycollective::avx2

#endif
