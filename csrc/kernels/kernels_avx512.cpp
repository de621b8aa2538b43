// The kernels for CPUs with AVX512.
#include <cstddef>
#include <cstdint>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#include "kernels/levels.h"
#include "numerics.h"

namespace pycollective::avx512 {
namespace {
constexpr int kVectorBytes = 64;
// clang-format off: each needs those before it
#include "kernels/lanes.inl"
#include "kernels/reduce.inl"
#include "kernels/combine.inl"
#include "kernels/find.inl"
// clang-format on
}  // namespace

Kernels find_kernels(Dtype dtype, ReduceOp op) { return find(dtype, op); }

}  // namespace pycollective::avx512

#endif
