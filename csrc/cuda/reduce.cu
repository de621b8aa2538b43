// A kernel for each dtype and reduce operation that the contract defines: reduce_<dtype>_<op>.
#include "cuda/reduce.h"

#include "dtype.h"

namespace pycollective::cuda {

// The codecs are what the table of dtypes says, so a kernel cannot get another's.
template <Dtype kType, ReduceOp kOp, class Codec>
constexpr bool fits =
    is_defined(kType, kOp) && sizeof(typename Codec::Stored) == traits_of(kType).size &&
    sizeof(typename Codec::Accumulator) == traits_of(kType).accumulator;

#define REDUCE(name, kType, op, kOp, Codec, ...)           \
  static_assert(fits<Dtype::kType, ReduceOp::kOp, Codec>); \
  KERNEL(reduce_##name##_##op, ReduceParameters) { reduce_all<Codec, __VA_ARGS__>(p); }

#define REDUCE_FLOAT(name, kType, Codec)           \
  REDUCE(name, kType, sum, kSum, Codec, Sum)       \
  REDUCE(name, kType, avg, kAvg, Codec, Sum, true) \
  REDUCE(name, kType, prod, kProd, Codec, Product) \
  REDUCE(name, kType, min, kMin, Codec, Minimum)   \
  REDUCE(name, kType, max, kMax, Codec, Maximum)

using Words = Plain<std::uint32_t>;
#define REDUCE_BITS(name, kType, Unsigned)                             \
  REDUCE(name, kType, band, kBand, Plain<Unsigned>, And, false, Words) \
  REDUCE(name, kType, bor, kBor, Plain<Unsigned>, Or, false, Words)    \
  REDUCE(name, kType, bxor, kBxor, Plain<Unsigned>, Xor, false, Words)

#define REDUCE_INTEGER(name, kType, Integer, Unsigned)       \
  REDUCE(name, kType, sum, kSum, Plain<Unsigned>, Sum)       \
  REDUCE(name, kType, prod, kProd, Plain<Unsigned>, Product) \
  REDUCE(name, kType, min, kMin, Plain<Integer>, Least)      \
  REDUCE(name, kType, max, kMax, Plain<Integer>, Greatest)   \
  REDUCE_BITS(name, kType, Unsigned)

REDUCE_FLOAT(float16, kFloat16, Float16)
REDUCE_FLOAT(bfloat16, kBFloat16, BFloat16)
REDUCE_FLOAT(float32, kFloat32, Float32)
REDUCE_FLOAT(float64, kFloat64, Float64)

REDUCE_INTEGER(int8, kInt8, std::int8_t, std::uint8_t)
REDUCE_INTEGER(int16, kInt16, std::int16_t, std::uint16_t)
REDUCE_INTEGER(int32, kInt32, std::int32_t, std::uint32_t)
REDUCE_INTEGER(int64, kInt64, std::int64_t, std::uint64_t)
REDUCE_INTEGER(uint8, kUInt8, std::uint8_t, std::uint8_t)

// Its bytes are 0 and 1: the least is their and, the greatest their or.
REDUCE(bool, kBool, min, kMin, Plain<std::uint8_t>, And, false, Words)
REDUCE(bool, kBool, max, kMax, Plain<std::uint8_t>, Or, false, Words)
REDUCE_BITS(bool, kBool, std::uint8_t)

}  // namespace pycollective::cuda
