// One instruction set's kernels, each compiled with its own flags (setup.py).
#pragma once

#include "kernels/kernels.h"

namespace pycollective {
namespace portable {
Kernels find_kernels(Dtype dtype, ReduceOp op);
}
namespace avx2 {
Kernels find_kernels(Dtype dtype, ReduceOp op);
}
namespace avx512 {
Kernels find_kernels(Dtype dtype, ReduceOp op);
}
}  // namespace pycollective
