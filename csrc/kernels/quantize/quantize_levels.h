// One instruction set's quantization, each compiled with its own flags (setup.py).
#pragma once

#include "kernels/quantize/quantize.h"

namespace pycollective {
namespace portable {
QuantizeCodecs quantize_codecs();
}
namespace avx2 {
QuantizeCodecs quantize_codecs();
}
namespace avx512 {
QuantizeCodecs quantize_codecs();
}
}  // namespace pycollective
