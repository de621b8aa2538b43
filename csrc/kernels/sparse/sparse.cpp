// Top-k selection and sparse sums by one instruction set: compiled once for each
// (kernels/levels.h).
#include "kernels/sparse/sparse.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>

#include "numerics.h"

namespace pycollective::PYCOLLECTIVE_LEVEL {
namespace {
// clang-format off: each needs those before it
#include "kernels/sparse/vectors.inl"
#include "kernels/sparse/selection.inl"
#include "kernels/sparse/indices.inl"
#include "kernels/sparse/sums.inl"
// clang-format on
}  // namespace

Sparse find_sparse() {
  return {add,     top_k,        top_k_chunks,   histogram, select, take,
          ascends, pack_indices, unpack_indices, sum,       scatter};
}

}  // namespace pycollective::PYCOLLECTIVE_LEVEL
