// One instruction set's codecs, each compiled with its own flags (setup.py).
#pragma once

#include "kernels/pack/pack.h"

namespace pycollective {
namespace portable {
Packing find_packing(Dtype dtype);
}
namespace avx2 {
Packing find_packing(Dtype dtype);
}
namespace avx512 {
Packing find_packing(Dtype dtype);
}
}  // namespace pycollective
