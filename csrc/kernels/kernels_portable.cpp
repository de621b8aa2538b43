// The kernels for any CPU that the compiler's defaults allow.
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kernels/levels.h"
#include "numerics.h"

namespace pycollective::portable {
namespace {
constexpr int kVectorBytes = 16;
#include "kernels/lanes.h"
#include "kernels/reduce.h"
}  // namespace

ReduceFn find_reduce(Dtype dtype, ReduceOp op) { return find(dtype, op); }

}  // namespace pycollective::portable
