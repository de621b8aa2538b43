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

template <Dtype kType>
using Unsigned = Plain<typename Integer<traits_of(kType).size>::Unsigned>;
template <Dtype kType, DlpackCode = traits_of(kType).dlpack>
struct OwnInteger : Unsigned<kType> {};
template <Dtype kType>
struct OwnInteger<kType, DlpackCode::kInt>
    : Plain<typename Integer<traits_of(kType).size>::Signed> {};

// Sums wrap as unsigned numbers do; averages are of the numbers that the type has.
template <Dtype kType>
struct Averaged : Unsigned<kType> {
  using Number = typename OwnInteger<kType>::Stored;
};

#define EACH_OF_kFloat(X, name, kType)                        \
  X(name, kType, sum, kSum, CodecOf<Dtype::kType>, Sum)       \
  X(name, kType, avg, kAvg, CodecOf<Dtype::kType>, Sum, true) \
  X(name, kType, prod, kProd, CodecOf<Dtype::kType>, Product) \
  X(name, kType, min, kMin, CodecOf<Dtype::kType>, Minimum)   \
  X(name, kType, max, kMax, CodecOf<Dtype::kType>, Maximum)

#define EACH_OF_BITS(X, name, kType)                                     \
  X(name, kType, band, kBand, Unsigned<Dtype::kType>, And, false, Words) \
  X(name, kType, bor, kBor, Unsigned<Dtype::kType>, Or, false, Words)    \
  X(name, kType, bxor, kBxor, Unsigned<Dtype::kType>, Xor, false, Words)

#define EACH_OF_kInteger(X, name, kType)                        \
  X(name, kType, sum, kSum, Unsigned<Dtype::kType>, Sum)        \
  X(name, kType, avg, kAvg, Averaged<Dtype::kType>, Sum, true)  \
  X(name, kType, prod, kProd, Unsigned<Dtype::kType>, Product)  \
  X(name, kType, min, kMin, OwnInteger<Dtype::kType>, Least)    \
  X(name, kType, max, kMax, OwnInteger<Dtype::kType>, Greatest) \
  EACH_OF_BITS(X, name, kType)

// The bytes are 0 and 1: the least is their and, the greatest their or.
#define EACH_OF_kTruth(X, name, kType)                                 \
  X(name, kType, min, kMin, Unsigned<Dtype::kType>, And, false, Words) \
  X(name, kType, max, kMax, Unsigned<Dtype::kType>, Or, false, Words)  \
  EACH_OF_BITS(X, name, kType)

#define EACH_OF_DTYPE(X, numbers, kType, name, ...) EACH_OF_##numbers(X, name, kType)
#define EACH_REDUCTION(X) PYCOLLECTIVE_EACH_DTYPE(EACH_OF_DTYPE, X)

}  // namespace pycollective::cuda
