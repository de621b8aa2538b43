// Quantization for CPUs with AVX-512 (F, BW, VL, DQ).
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>

#include "kernels/quantize/quantize_levels.h"
#include "numerics.h"
#include "types.h"

namespace pycollective::avx512 {
namespace {
constexpr int kVectorBytes = 64;
// clang-format off: each needs those before it
#include "kernels/lanes.h"
#include "kernels/quantize/elements.h"
#include "kernels/quantize/stream.h"
#include "kernels/quantize/one_bit.h"
#include "kernels/quantize/int8.h"
#include "kernels/quantize/frame.h"
// clang-format on
}  // namespace

Quantizing find_quantizing(QuantizeCodec codec, Dtype dtype) { return find(codec, dtype); }

}  // namespace pycollective::avx512

#endif
