// Rounding, conversion, the NaN rule, minimum and maximum: the single source, for every kernel on
// host and device.
//
// Each function serves one number, or a vector of them (GCC's vector extension): V is the floating
// type, Bits the unsigned type of the same shape. fp16 and bf16 are handled as their bits, in the
// low half of a 32-bit word. The floating-point environment must be the IEEE default.
#pragma once

#include <cfloat>
#include <cstdint>
#include <cstring>

#include "dtype.h"

// Internal linkage: files compiled for different instruction sets must not share a function.
#if defined(__CUDACC__)
#define PYCOLLECTIVE_HD static __host__ __device__ __forceinline__
#else
#define PYCOLLECTIVE_HD static inline
#endif

namespace pycollective {

static_assert(FLT_EVAL_METHOD == 0, "each operation must round to its own type");

// Each type's one quiet NaN.
constexpr std::uint32_t kNanFloat16 = traits_of(Dtype::kFloat16).nan;
constexpr std::uint32_t kNanBFloat16 = traits_of(Dtype::kBFloat16).nan;
constexpr std::uint32_t kNanFloat32 = traits_of(Dtype::kFloat32).nan;
constexpr std::uint64_t kNanFloat64 = traits_of(Dtype::kFloat64).nan;

template <class To, class From>
PYCOLLECTIVE_HD To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

// The value, with `nan` in the place of every NaN.
template <class Bits, class V, class Word>
PYCOLLECTIVE_HD V canonical(V value, Word nan) {
  return value == value ? value : bits_as<V>(Bits{} + nan);
}

// IEEE 754-2019 minimum and maximum: a NaN wins, and -0 is below +0. Equal numbers have equal bits
// but for the sign of zero, which the bitwise operation settles.
template <class Bits, class V>
PYCOLLECTIVE_HD V minimum(V a, V b) {
  const V equal = bits_as<V>(bits_as<Bits>(a) | bits_as<Bits>(b));
  return a != a ? a : a == b ? equal : a < b ? a : b;
}

template <class Bits, class V>
PYCOLLECTIVE_HD V maximum(V a, V b) {
  const V equal = bits_as<V>(bits_as<Bits>(a) & bits_as<Bits>(b));
  return a != a ? a : a == b ? equal : a > b ? a : b;
}

// The nearest bf16, as the fp32 that it is the upper half of (the lower half is unspecified).
template <class Bits, class V>
PYCOLLECTIVE_HD Bits round_to_bfloat16(V value) {
  const Bits bits = bits_as<Bits>(value);
  const Bits rounded = bits + 0x7FFF + (bits >> 16 & 1);
  return value == value ? rounded : Bits{} + (kNanBFloat16 << 16);
}

template <class V, class Bits>
PYCOLLECTIVE_HD V float_from_float16(Bits bits) {
  // Under fp32's exponent bias the number is 2^112 too small, a subnormal too; infinity and NaN,
  // then 65536 and up, need the highest exponent.
  constexpr float kRebias = 0x1p112F;
  const V magnitude = bits_as<V>((bits & 0x7FFF) << 13) * kRebias;
  const Bits finite = bits_as<Bits>(magnitude);
  const Bits number = magnitude < 65536.0F ? finite : finite | 0x7F800000;
  return bits_as<V>(number | (bits & 0x8000) << 16);
}

template <class Bits, class V>
PYCOLLECTIVE_HD Bits float16_from_float(V value) {
  const Bits bits = bits_as<Bits>(value);
  const V magnitude = bits_as<V>(bits & 0x7FFFFFFF);
  const V clamped = magnitude < 65536.0F ? magnitude : V{} + 65536.0F;
  // Normal: take 112 from the exponent and round the 13 bits that go. 65520 and up carry into
  // infinity.
  const Bits wide = bits_as<Bits>(clamped);
  const Bits normal = (wide + (0xFFF - 0x38000000U) + (wide >> 13 & 1)) >> 13;
  // Subnormal: the last place of 1/2 is 2^-24, as that of fp16's subnormals: adding rounds to it.
  const Bits subnormal = bits_as<Bits>(clamped + 0.5F) - 0x3F000000;
  const Bits rounded = clamped < 0x1p-14F ? subnormal : normal;
  const Bits number = rounded | (bits >> 16 & 0x8000);
  return value == value ? number : Bits{} + kNanFloat16;
}

}  // namespace pycollective
