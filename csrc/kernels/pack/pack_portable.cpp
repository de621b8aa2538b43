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
#include "kernels/pack/block.inl"
#include "kernels/pack/window.inl"
#include "kernels/pack/fixed.inl"
#include "kernels/pack/codecs.inl"
#include "kernels/pack/frame.inl"
// clang-format on
}  // namespace

Packing find_packing(Dtype dtype) { return find(dtype); }

}  // namespace pycollective::portable
