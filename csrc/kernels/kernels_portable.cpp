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
#include "kernels/lanes.h"
#include "kernels/reduce.h"
#include "kernels/combine.h"
#include "kernels/find.h"
// clang-format on
}  // namespace

Kernels find_kernels(Dtype dtype, ReduceOp op) { return find(dtype, op); }

}  // namespace pycollective::portable
