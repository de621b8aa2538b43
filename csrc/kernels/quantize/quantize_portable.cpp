// Quantization for every CPU.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels/quantize/quantize_levels.h"
#include "numerics.h"
#include "types.h"

namespace pycollective::portable {
namespace {
constexpr int kVectorBytes = 16;
// clang-format off: each needs those before it
#include "kernels/lanes.inl"
#include "kernels/quantize/elements.inl"
#include "kernels/quantize/stream.inl"
#include "kernels/quantize/frame.inl"
#include "kernels/quantize/codecs.inl"
// clang-format on
}  // namespace

QuantizeCodecs quantize_codecs() { return {kCodecs, sizeof(kCodecs) / sizeof(kCodecs[0])}; }

}  // namespace pycollective::portable
