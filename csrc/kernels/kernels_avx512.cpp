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
#include "kernels/lanes.h"
#include "kernels/reduce.h"
}  // namespace

ReduceFn find_reduce(Dtype dtype, ReduceOp op) { return find(dtype, op); }

}  // namespace pycollective::avx512

#endif
