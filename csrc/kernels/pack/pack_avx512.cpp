// The codecs of exact packing for CPUs with AVX-512 (F, BW, VL, DQ).
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>

#include "kernels/pack/pack_levels.h"

namespace pycollective::avx512 {
namespace {
constexpr int kVectorBytes = 64;
// clang-format off: each needs those before it
#include "kernels/pack/block.inl"
#include "kernels/pack/window.inl"
#include "kernels/pack/fixed.inl"
#include "kernels/pack/codecs.inl"
#include "kernels/pack/frame.inl"
// clang-format on
}  // namespace

Packing find_packing(Dtype dtype) { return find(dtype); }

}  // namespace pycollective::avx512

#endif
