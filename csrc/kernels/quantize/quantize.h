// Quantization with error feedback, to 1 bit, 8 bits and so on. The bits are the same at each
// level. docs/inside/wire.md says what a payload is, byte by byte.
#pragma once

#include <cstddef>

#include "dtype.h"
#include "kernels/levels.h"

namespace pycollective {

// A chunk is a multiple of kLeastChunk elements, at most kMostChunk. The last of an array may be
// shorter.
constexpr std::size_t kLeastChunk = 64, kMostChunk = 65536;
constexpr bool is_chunk(std::size_t chunk) {
  return chunk >= kLeastChunk && chunk <= kMostChunk && chunk % kLeastChunk == 0;
}

// Quantizes c = x + held. False if a number is not finite: `left` and `payload` then hold anything.
//
//   x        `count` elements; any alignment, as of all that follow.
//   held     as many fp32, left of earlier calls, or nullptr: nothing.
//   left     as many fp32: c minus what the payload decodes to. Overlaps no input.
//   payload  room for quantized_bytes(). Overlaps nothing.
using QuantizeFn = bool (*)(const void* x, const float* held, float* left, std::size_t count,
                            std::size_t chunk, std::byte* payload);

// Decodes `rows` payloads, adds them in the contract's order, divides, and rounds once. Whatever
// they hold, nothing outside of their quantized_bytes() is read.
//
//   payloads  the first row's; the next ones are `stride` bytes apart.
//   rows      1 to kCountableRanks.
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

// A codec as it is at a SIMD level.
struct QuantizeCodec {
  const char* name;
  std::size_t (*record_bytes)(std::size_t elements);  // of one chunk
  Quantizing (*find)(Dtype dtype);  // null for types other than fp16, bf16 and fp32
};

// All that there are (quantize.cpp), in the same order at each level.
struct QuantizeCodecs {
  const QuantizeCodec* first;
  std::size_t count;

  const QuantizeCodec* begin() const { return first; }
  const QuantizeCodec* end() const { return first + count; }
  std::size_t size() const { return count; }
  const QuantizeCodec& operator[](std::size_t i) const { return first[i]; }
};

PYCOLLECTIVE_OF_EACH_LEVEL(QuantizeCodecs quantize_codecs())

inline QuantizeCodecs quantize_codecs(SimdLevel level) {
  return PYCOLLECTIVE_AT_LEVEL(level, quantize_codecs());
}

// Bytes of the payload of `count` elements: the records of their chunks.
inline std::size_t quantized_bytes(const QuantizeCodec& codec, std::size_t chunk,
                                   std::size_t count) {
  const std::size_t rest = count % chunk;
  return count / chunk * codec.record_bytes(chunk) + (rest == 0 ? 0 : codec.record_bytes(rest));
}

}  // namespace pycollective
