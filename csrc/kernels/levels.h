// One instruction set's kernels, each compiled with its own flags (setup.py).
#pragma once

#include "kernels/kernels.h"

namespace pycollective {
namespace portable {
ReduceFn find_reduce(Dtype dtype, ReduceOp op);
}
namespace avx2 {
ReduceFn find_reduce(Dtype dtype, ReduceOp op);
}
namespace avx512 {
ReduceFn find_reduce(Dtype dtype, ReduceOp op);
}
}  // namespace pycollective
