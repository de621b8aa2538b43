// Exact packing: fewer bytes on a slow link, the same bits at its end. CPU kernels, chosen at run
// time; docs/inside/wire.md says what a payload is, byte by byte, for every processor.
#pragma once

#include <cstddef>

#include "dtype.h"
#include "kernels/levels.h"

namespace pycollective {

// The most bytes that `count` elements take packed: what they take raw. A payload of that length is
// raw, and whatever would not be shorter is sent so.
constexpr std::size_t pack_bound(Dtype dtype, std::size_t count) { return count * size_of(dtype); }

// Packs `count` elements into `out` and returns the payload's bytes. Every bit pattern comes back
// as it was.
//
//   in       any alignment.
//   out      room for pack_bound() bytes, all of which may be written; any alignment; overlaps
//            nothing.
using PackFn = std::size_t (*)(const void* in, std::size_t count, std::byte* out);

// Unpacks a payload of exactly `bytes` bytes into `count` elements. False if no encoder makes such
// a payload of so many elements (docs/inside/wire.md says what is seen): `out` then holds anything.
// Whatever the payload holds, nothing outside in[0, bytes) is read and nothing outside `out`
// written.
//
//   out      room for `count` elements; any alignment; overlaps nothing.
using UnpackFn = bool (*)(const std::byte* in, std::size_t bytes, void* out, std::size_t count);

// Both keep no state and allocate nothing.
struct Packing {
  PackFn pack = nullptr;
  UnpackFn unpack = nullptr;
};

PYCOLLECTIVE_OF_EACH_LEVEL(Packing find_packing(Dtype dtype))

// Null where there is no codec for the type: all but fp16, bf16 and fp32, leaves or nodes.
inline Packing find_packing(Dtype dtype, SimdLevel level) {
  return PYCOLLECTIVE_AT_LEVEL(level, find_packing(dtype));
}

}  // namespace pycollective
