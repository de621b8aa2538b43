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
#include "kernels/lanes.h"
#include "kernels/reduce.h"
}  // namespace

ReduceFn find_reduce(Dtype dtype, ReduceOp op) { return find(dtype, op); }

}  // namespace pycollective::avx2

#endif
