// The kernels for any CPU under every level's name: what races does not depend on the level, and to
// compile each level's kernels for TSan takes half a minute.
#include "kernels/copy.h"
#include "kernels/kernels.h"
#include "kernels/pack/pack.h"

namespace pycollective {
namespace avx2 {
Copies find_copies() { return portable::find_copies(); }
Kernels find_kernels(Dtype dtype, ReduceOp op) { return portable::find_kernels(dtype, op); }
Packing find_packing(Dtype dtype) { return portable::find_packing(dtype); }
}  // namespace avx2
namespace avx512 {
Copies find_copies() { return portable::find_copies(); }
Kernels find_kernels(Dtype dtype, ReduceOp op) { return portable::find_kernels(dtype, op); }
Packing find_packing(Dtype dtype) { return portable::find_packing(dtype); }
}  // namespace avx512
}  // namespace pycollective
