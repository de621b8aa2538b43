// The kernels for any CPU that the compiler's defaults allow.
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kernels/levels.h"
#include "numerics.h"

namespace pycollective::portable {
namespace {
constexpr int kVectorBytes = 16;
// clang-format off: each needs those before it
#include "kernels/lanes.inl"
#include "kernels/reduce.inl"
#include "kernels/combine.inl"
#include "kernels/find.inl"
// clang-format on
}  // namespace

Kernels find_kernels(Dtype dtype, ReduceOp op) { return find(dtype, op); }

}  // namespace pycollective::portable
