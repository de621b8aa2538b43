// Rounding, conversion and the NaN rule: the single source, for host and device code.
//
// fp16 and bf16 are handled as their bits. Every rounding is to nearest even on integers, so that
// neither the floating-point environment nor an instruction that flushes subnormals
// (VCVTNEPS2BF16 does) can change a result.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define PYCOLLECTIVE_HD __host__ __device__ __forceinline__
#else
#define PYCOLLECTIVE_HD inline
#endif

namespace pycollective {

// Each type's one quiet NaN.
constexpr std::uint16_t kNanFloat16 = 0x7E00;
constexpr std::uint16_t kNanBFloat16 = 0x7FC0;
constexpr std::uint32_t kNanFloat32 = 0x7FC00000;
constexpr std::uint64_t kNanFloat64 = 0x7FF8000000000000;

template <class To, class From>
PYCOLLECTIVE_HD To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

PYCOLLECTIVE_HD float float_from_bfloat16(std::uint16_t bits) {
  return bits_as<float>(static_cast<std::uint32_t>(bits) << 16);
}

PYCOLLECTIVE_HD std::uint16_t bfloat16_from_float(float value) {
  const std::uint32_t bits = bits_as<std::uint32_t>(value);
  if ((bits & 0x7FFFFFFF) > 0x7F800000) return kNanBFloat16;
  return static_cast<std::uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

PYCOLLECTIVE_HD float float_from_float16(std::uint16_t bits) {
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000) << 16;
  const std::uint32_t exponent = bits >> 10 & 0x1F;
  std::uint32_t fraction = bits & 0x3FF;
  if (exponent == 0x1F) return bits_as<float>(sign | 0x7F800000 | fraction << 13);
  if (exponent != 0) return bits_as<float>(sign | (exponent + 112) << 23 | fraction << 13);
  if (fraction == 0) return bits_as<float>(sign);
  // Subnormal: move its leading one up to where a normal number has it.
  std::uint32_t shifted = 113;
  while ((fraction & 0x400) == 0) {
    fraction <<= 1;
    --shifted;
  }
  return bits_as<float>(sign | shifted << 23 | (fraction & 0x3FF) << 13);
}

PYCOLLECTIVE_HD std::uint16_t float16_from_float(float value) {
  const std::uint32_t bits = bits_as<std::uint32_t>(value);
  const std::uint32_t sign = bits >> 16 & 0x8000;
  const std::uint32_t magnitude = bits & 0x7FFFFFFF;
  if (magnitude > 0x7F800000) return kNanFloat16;
  if (magnitude >= 0x47800000) return static_cast<std::uint16_t>(sign | 0x7C00);
  if (magnitude >= 0x38800000) {  // normal in fp16; a carry into 65536 gives infinity
    const std::uint32_t rebiased = magnitude - 0x38000000;
    return static_cast<std::uint16_t>(sign | (rebiased + 0xFFF + (rebiased >> 13 & 1)) >> 13);
  }
  const std::uint32_t shift = 126 - (magnitude >> 23);  // down to units of 2^-24
  if (shift > 24) return static_cast<std::uint16_t>(sign);
  const std::uint32_t fraction = (magnitude & 0x7FFFFF) | 0x800000;
  const std::uint32_t rest = fraction & ((std::uint32_t{1} << shift) - 1);
  const std::uint32_t half = std::uint32_t{1} << (shift - 1);
  std::uint32_t result = fraction >> shift;
  result += rest > half || (rest == half && (result & 1) != 0);
  return static_cast<std::uint16_t>(sign | result);
}

}  // namespace pycollective
