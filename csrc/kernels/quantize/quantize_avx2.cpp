// Quantization for CPUs with AVX2 and F16C.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>

#include "kernels/quantize/quantize_levels.h"
#include "numerics.h"
#include "types.h"

namespace pycollective::avx2 {
namespace {
constexpr int kVectorBytes = 32;
// clang-format off: each needs those before it
#include "kernels/lanes.inl"
#include "kernels/quantize/elements.inl"
#include "kernels/quantize/stream.inl"
#include "kernels/quantize/frame.inl"
#include "kernels/quantize/codecs.inl"
// clang-format on
}  // namespace

QuantizeCodecs quantize_codecs() { return {kCodecs, sizeof(kCodecs) / sizeof(kCodecs[0])}; }

}  // namespace pycollective::avx2

#endif
