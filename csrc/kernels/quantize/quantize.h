// 1-bit and 8-bit quantization with error feedback. CPU kernels, chosen at run time, which give the
// same bits at each SIMD level; docs/wire.md says what a payload is, byte by byte, for every
// processor.
#pragma once

#include <cstddef>

#include "dtype.h"
#include "kernels/kernels.h"

namespace pycollective {

enum class QuantizeCodec { kOneBit, kInt8 };
struct QuantizeCodecTraits {
  QuantizeCodec codec;
  const char* name;
  std::size_t bits;  // an element's, beside its chunk's scale
};
constexpr QuantizeCodecTraits kQuantizeCodecTable[] = {
    {QuantizeCodec::kOneBit, "one_bit", 1},
    {QuantizeCodec::kInt8, "int8", 8},
};
constexpr const QuantizeCodecTraits& traits_of(QuantizeCodec codec) {
  return kQuantizeCodecTable[static_cast<int>(codec)];
}

// A chunk is a multiple of kLeastChunk elements, kMostChunk at most; the last of an array is as
// short as it must be.
constexpr std::size_t kLeastChunk = 64, kMostChunk = 65536;
constexpr bool is_chunk(std::size_t chunk) {
  return chunk >= kLeastChunk && chunk <= kMostChunk && chunk % kLeastChunk == 0;
}

// Bytes of the record of one chunk of so many elements: scale, then data.
constexpr std::size_t record_bytes(QuantizeCodec codec, std::size_t elements) {
  return sizeof(float) + (traits_of(codec).bits * elements + 7) / 8;
}

// Bytes of the payload of `count` elements.
constexpr std::size_t quantized_bytes(QuantizeCodec codec, std::size_t chunk, std::size_t count) {
  const std::size_t rest = count % chunk;
  return count / chunk * record_bytes(codec, chunk) + (rest == 0 ? 0 : record_bytes(codec, rest));
}

// Quantizes c = x + held. False if a number is not finite: `left` and `payload` then hold anything.
//
//   x        `count` elements; any alignment, as of all that follow.
//   held     as many fp32, what was left of earlier calls, or nullptr: nothing.
//   left     as many fp32: c less what the payload decodes to. Overlaps no input.
//   payload  room for quantized_bytes(). Overlaps nothing.
using QuantizeFn = bool (*)(const void* x, const float* held, float* left, std::size_t count,
                            std::size_t chunk, std::byte* payload);

// Adds up what `rows` payloads decode to, in the contract's order, divides and rounds once.
// Whatever they hold, nothing outside of their quantized_bytes() is read.
//
//   payloads  the first row's; the next ones are `stride` bytes apart.
//   rows      1 to kMaxRanks.
//   out       room for `count` elements; overlaps nothing.
//   divisor   1: do not divide.
using DequantizeFn = void (*)(const std::byte* payloads, std::size_t rows, std::size_t stride,
                              std::size_t chunk, void* out, std::size_t count, float divisor);

// Neither keeps state or allocates. The caller's floating-point environment must be the IEEE
// default: hold a FloatEnvironment.
struct Quantizing {
  QuantizeFn quantize = nullptr;
  DequantizeFn dequantize = nullptr;
};

// Null for types other than fp16, bf16 and fp32.
Quantizing find_quantizing(QuantizeCodec codec, Dtype dtype, SimdLevel level);

}  // namespace pycollective
