// The codecs of exact packing for every CPU.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include "kernels/pack/pack_levels.h"

namespace pycollective::portable {
namespace {
constexpr int kVectorBytes = 16;
// clang-format off: each needs those before it
#include "kernels/pack/block.h"
#include "kernels/pack/window.h"
#include "kernels/pack/fixed.h"
#include "kernels/pack/codecs.h"
#include "kernels/pack/frame.h"
// clang-format on
}  // namespace

Packing find_packing(Dtype dtype) { return find(dtype); }

}  // namespace pycollective::portable
