// Rounding, conversion, the NaN rule, minimum and maximum, averages of integers: the single source,
// for every kernel on host and device.
//
// Each function serves one number, or a vector of them (GCC's vector extension): V is the floating
// type, Bits the unsigned type of the same shape. Floats of 8 and 16 bits are handled as their
// bits, in the low part of a 32-bit word. The floating-point environment must be the IEEE default.
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

// The average of n integers, from the bits of their wrapped sum: T's quotient, cut towards zero.
template <class T, class Bits>
PYCOLLECTIVE_HD Bits average_of(Bits sum, int n) {
  static_assert(sizeof(T) == sizeof(Bits));
  return static_cast<Bits>(static_cast<T>(sum) / n);
}

// The nearest bf16, as the fp32 that it is the upper half of (the lower half is unspecified).
template <class Bits, class V>
PYCOLLECTIVE_HD Bits round_to_bfloat16(V value) {
  const Bits bits = bits_as<Bits>(value);
  const Bits rounded = bits + 0x7FFF + (bits >> 16 & 1);
  return value == value ? rounded : Bits{} + (kNanBFloat16 << 16);
}

constexpr float power_of_two(int exponent) {
  float power = 1;
  for (; exponent > 0; --exponent) power *= 2;
  for (; exponent < 0; ++exponent) power /= 2;
  return power;
}

// A float of 8 or 16 bits beside fp32, from its row of the table.
template <Dtype kType>
struct NarrowFloat {
  static_assert(traits_of(kType).numbers == Numbers::kFloat && size_of(kType) <= 2);
  static constexpr int kBits = 8 * static_cast<int>(size_of(kType));
  static constexpr std::uint32_t kSign = 1U << (kBits - 1);
  static constexpr std::uint32_t kNan = traits_of(kType).nan;
  static constexpr int kMantissa = traits_of(kType).mantissa;
  static constexpr int kDropped = 23 - kMantissa;  // of fp32's
  static constexpr int kBias = (1 << (kBits - 2 - kMantissa)) - 1;
  static constexpr float kRebiasFactor = power_of_two(127 - kBias);
  static constexpr std::uint32_t kLeastExponent = (128U - kBias) << 23;  // of a normal
  static constexpr std::uint32_t kUnbias = (0U - (kLeastExponent >> kDropped)) & (kSign - 1);
  static constexpr bool kIsHalfOfFloat = kBits == 16 && kBias == 127;
  // The first magnitude that is no number, and what it would be if it were; fp32 has it too, unless
  // it has the type's exponents.
  static constexpr std::uint32_t kBeyond = traits_of(kType).largest + 1;
  static constexpr float kBeyondValue =
      kIsHalfOfFloat
          ? 0
          : power_of_two(static_cast<int>(kBeyond >> kMantissa) - kBias - kMantissa) *
                static_cast<float>(1U << kMantissa | (kBeyond & ((1U << kMantissa) - 1)));
  static constexpr std::uint32_t kBeyondBits = (kBeyond << kDropped) + kLeastExponent - (1U << 23);
  static constexpr bool kHasInfinity = kBeyond != kNan;
};

// Of the low part of a word; what is above is not looked at.
template <Dtype kType, class V, class Bits>
PYCOLLECTIVE_HD V float_from(Bits bits) {
  using Narrow = NarrowFloat<kType>;
  if constexpr (Narrow::kIsHalfOfFloat) {
    return bits_as<V>(bits << 16);
  } else {
    // Under fp32's exponent bias the number is too small, a subnormal too; infinity and NaN need
    // the highest exponent.
    const V magnitude =
        bits_as<V>((bits & (Narrow::kSign - 1)) << Narrow::kDropped) * Narrow::kRebiasFactor;
    const Bits finite = bits_as<Bits>(magnitude);
    const Bits number = magnitude < Narrow::kBeyondValue ? finite : finite | 0x7F800000;
    return bits_as<V>(number | (bits & Narrow::kSign) << (32 - Narrow::kBits));
  }
}

// Of words below 2^31, vectors compared as signed ones: SSE2 compares no others.
template <class Bits>
PYCOLLECTIVE_HD Bits lesser(Bits a, Bits b) {
  if constexpr (sizeof(Bits) == sizeof(std::uint32_t))
    return a < b ? a : b;
  else
    return (decltype(a < b))a < (decltype(a < b))b ? a : b;
}
template <class Bits>
PYCOLLECTIVE_HD Bits greater(Bits a, Bits b) {
  if constexpr (sizeof(Bits) == sizeof(std::uint32_t))
    return a > b ? a : b;
  else
    return (decltype(a < b))a > (decltype(a < b))b ? a : b;
}

// The nearest number's bits, or the type's one NaN's, in the low part of a word.
template <Dtype kType, class Bits, class V>
PYCOLLECTIVE_HD Bits rounded_to(V value) {
  using Narrow = NarrowFloat<kType>;
  if constexpr (Narrow::kIsHalfOfFloat) {
    return round_to_bfloat16<Bits>(value) >> 16;
  } else {
    constexpr int kDropped = Narrow::kDropped;
    const Bits bits = bits_as<Bits>(value);
    const Bits magnitude = bits & 0x7FFFFFFF;
    // NaN is beyond, too.
    const Bits clamped = lesser(magnitude, Bits{} + Narrow::kBeyondBits);
    // A float whose last place is that of the type's numbers of this exponent, subnormals having
    // the least normal's: adding it rounds, to nearest even, and counts places. From halfway on,
    // the largest number carries into what is beyond. The places that it has itself make up for the
    // exponent's bias in the sum of the two; what is above the type's bits is nothing.
    const Bits own = clamped & 0x7F800000;
    const Bits exponent = greater(own, Bits{} + Narrow::kLeastExponent);
    const Bits align = exponent + ((static_cast<std::uint32_t>(kDropped) << 23) + Narrow::kUnbias);
    const Bits places = bits_as<Bits>(bits_as<V>(clamped) + bits_as<V>(align));
    const Bits rounded = (places + (exponent >> kDropped)) & (Narrow::kSign - 1);
    const Bits number = rounded | (bits >> (32 - Narrow::kBits) & Narrow::kSign);
    if constexpr (Narrow::kHasInfinity)
      return value == value ? number : Bits{} + Narrow::kNan;
    else
      return rounded < Narrow::kBeyond ? number : Bits{} + Narrow::kNan;
  }
}

}  // namespace pycollective
