// One instruction set's quantization, each compiled with its own flags (setup.py).
#pragma once

#include "kernels/quantize/quantize.h"

namespace pycollective {
namespace portable {
Quantizing find_quantizing(QuantizeCodec codec, Dtype dtype);
}
namespace avx2 {
Quantizing find_quantizing(QuantizeCodec codec, Dtype dtype);
}
namespace avx512 {
Quantizing find_quantizing(QuantizeCodec codec, Dtype dtype);
}
}  // namespace pycollective
