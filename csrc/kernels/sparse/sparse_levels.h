// One instruction set's kernels, each compiled with its own flags (setup.py).
#pragma once

#include "kernels/sparse/sparse.h"

namespace pycollective {
namespace portable {
Sparse find_sparse();
}
namespace avx2 {
Sparse find_sparse();
}
namespace avx512 {
Sparse find_sparse();
}
}  // namespace pycollective
