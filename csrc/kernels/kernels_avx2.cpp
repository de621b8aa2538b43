// The kernels for CPUs with AVX2 and F16C.
#include <cstddef>
#include <cstdint>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#include "kernels/levels.h"
#include "numerics.h"

namespace pycollective::avx2 {
namespace {
constexpr int kVectorBytes = 32;
// clang-format off: each needs those before it
#include "kernels/lanes.inl"
#include "kernels/reduce.inl"
#include "kernels/combine.inl"
#include "kernels/find.inl"
// clang-format on
}  // namespace

Kernels find_kernels(Dtype dtype, ReduceOp op) { return find(dtype, op); }

}  // namespace pycollective::avx2

#endif
