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
#include "kernels/lanes.h"
#include "kernels/quantize/elements.h"
#include "kernels/quantize/stream.h"
#include "kernels/quantize/frame.h"
#include "kernels/quantize/codecs.h"
// clang-format on
}  // namespace

QuantizeCodecs quantize_codecs() { return {kCodecs, sizeof(kCodecs) / sizeof(kCodecs[0])}; }

}  // namespace pycollective::portable
