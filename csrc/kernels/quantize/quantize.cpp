// Quantization by one instruction set: compiled once for each (kernels/levels.h).
#include "kernels/quantize/quantize.h"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "numerics.h"
#include "types.h"

namespace pycollective::PYCOLLECTIVE_LEVEL {
namespace {
// clang-format off: each needs those before it
#include "kernels/lanes.inl"
#include "kernels/quantize/elements.inl"
#include "kernels/quantize/frame.inl"
#include "kernels/quantize/int8.inl"
#include "kernels/quantize/one_bit.inl"
// clang-format on

constexpr QuantizeCodec kCodecs[] = {
    row_of<OneBit>(),
    row_of<Int8>(),
};

}  // namespace

QuantizeCodecs quantize_codecs() { return {kCodecs, sizeof(kCodecs) / sizeof(kCodecs[0])}; }

}  // namespace pycollective::PYCOLLECTIVE_LEVEL
