// The contract's reductions in kernels: EACH_REDUCTION(X) is an X(dtype, kDtype, op, kOp, codec,
// Operation...) for each, the last being the template arguments of reduce.h behind the codec.
#pragma once

#include "cuda/elements.h"
#include "cuda/reduce_operations.h"
#include "dtype.h"

namespace pycollective::cuda {

// The codecs are what the table of dtypes says, so a kernel cannot get another's.
template <Dtype kType, ReduceOp kOp, class Codec>
constexpr bool fits =
    is_defined(kType, kOp) && sizeof(typename Codec::Stored) == traits_of(kType).size &&
    sizeof(typename Codec::Accumulator) == traits_of(kType).accumulator;

using Words = Plain<std::uint32_t>;

#define EACH_OF_FLOAT(X, name, kType, Codec)  \
  X(name, kType, sum, kSum, Codec, Sum)       \
  X(name, kType, avg, kAvg, Codec, Sum, true) \
  X(name, kType, prod, kProd, Codec, Product) \
  X(name, kType, min, kMin, Codec, Minimum)   \
  X(name, kType, max, kMax, Codec, Maximum)

#define EACH_OF_BITS(X, name, kType, Unsigned)                    \
  X(name, kType, band, kBand, Plain<Unsigned>, And, false, Words) \
  X(name, kType, bor, kBor, Plain<Unsigned>, Or, false, Words)    \
  X(name, kType, bxor, kBxor, Plain<Unsigned>, Xor, false, Words)

#define EACH_OF_INTEGER(X, name, kType, Integer, Unsigned) \
  X(name, kType, sum, kSum, Plain<Unsigned>, Sum)          \
  X(name, kType, prod, kProd, Plain<Unsigned>, Product)    \
  X(name, kType, min, kMin, Plain<Integer>, Least)         \
  X(name, kType, max, kMax, Plain<Integer>, Greatest)      \
  EACH_OF_BITS(X, name, kType, Unsigned)

// Of bool the bytes are 0 and 1: the least is their and, the greatest their or.
#define EACH_REDUCTION(X)                                           \
  EACH_OF_FLOAT(X, float16, kFloat16, Float16)                      \
  EACH_OF_FLOAT(X, bfloat16, kBFloat16, BFloat16)                   \
  EACH_OF_FLOAT(X, float32, kFloat32, Float32)                      \
  EACH_OF_FLOAT(X, float64, kFloat64, Float64)                      \
  EACH_OF_INTEGER(X, int8, kInt8, std::int8_t, std::uint8_t)        \
  EACH_OF_INTEGER(X, int16, kInt16, std::int16_t, std::uint16_t)    \
  EACH_OF_INTEGER(X, int32, kInt32, std::int32_t, std::uint32_t)    \
  EACH_OF_INTEGER(X, int64, kInt64, std::int64_t, std::uint64_t)    \
  EACH_OF_INTEGER(X, uint8, kUInt8, std::uint8_t, std::uint8_t)     \
  X(bool, kBool, min, kMin, Plain<std::uint8_t>, And, false, Words) \
  X(bool, kBool, max, kMax, Plain<std::uint8_t>, Or, false, Words)  \
  EACH_OF_BITS(X, bool, kBool, std::uint8_t)

}  // namespace pycollective::cuda
