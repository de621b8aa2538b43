// Exact packing by one instruction set: compiled once for each (kernels/levels.h).
#include "kernels/pack/pack.h"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

namespace pycollective::PYCOLLECTIVE_LEVEL {
namespace {
// clang-format off: each needs those before it
#include "kernels/pack/block.inl"
#include "kernels/pack/window.inl"
#include "kernels/pack/fixed.inl"
#include "kernels/pack/codecs.inl"
#include "kernels/pack/frame.inl"
// clang-format on
}  // namespace

Packing find_packing(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat16:
      return packing<Packed16<5>>();
    case Dtype::kBFloat16:
      return packing<Packed16<8>>();
    case Dtype::kFloat32:
      return packing<Packed32>();
    default:
      return {};
  }
}

}  // namespace pycollective::PYCOLLECTIVE_LEVEL
