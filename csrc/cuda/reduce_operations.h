// The reduce operations in kernels, of one number each; and the contract's reductions:
// EACH_REDUCTION(X) is an X(dtype, kDtype, op, kOp, codec, Operation...) for each, the last being
// the template arguments of reduce.h behind the codec.
#pragma once

#include "cuda/elements.h"
#include "dtype.h"
#include "numerics.h"

namespace pycollective::cuda {

// Integers narrower than `int` are computed in it, and cut: they wrap, as the contract says.
struct Sum {
  static constexpr bool kRounds = true;
  template <class V>
  DEVICE V apply(V a, V b) {
    return static_cast<V>(a + b);
  }
};
struct Product {
  static constexpr bool kRounds = true;
  template <class V>
  DEVICE V apply(V a, V b) {
    // Of 16 bits two would be multiplied as int, and overflow.
    if constexpr (sizeof(V) == 2)
      return static_cast<V>(1U * a * b);
    else
      return static_cast<V>(a * b);
  }
};

// Of floats.
struct Minimum {
  static constexpr bool kRounds = false;
  DEVICE float apply(float a, float b) { return minimum<std::uint32_t>(a, b); }
  DEVICE double apply(double a, double b) { return minimum<std::uint64_t>(a, b); }
};
struct Maximum {
  static constexpr bool kRounds = false;
  DEVICE float apply(float a, float b) { return maximum<std::uint32_t>(a, b); }
  DEVICE double apply(double a, double b) { return maximum<std::uint64_t>(a, b); }
};

// Of integers.
struct Least {
  static constexpr bool kRounds = false;
  template <class V>
  DEVICE V apply(V a, V b) {
    return a < b ? a : b;
  }
};
struct Greatest {
  static constexpr bool kRounds = false;
  template <class V>
  DEVICE V apply(V a, V b) {
    return a > b ? a : b;
  }
};
struct And {
  static constexpr bool kRounds = false;
  template <class V>
  DEVICE V apply(V a, V b) {
    return static_cast<V>(a & b);
  }
};
struct Or {
  static constexpr bool kRounds = false;
  template <class V>
  DEVICE V apply(V a, V b) {
    return static_cast<V>(a | b);
  }
};
struct Xor {
  static constexpr bool kRounds = false;
  template <class V>
  DEVICE V apply(V a, V b) {
    return static_cast<V>(a ^ b);
  }
};

template <class A>
constexpr bool is_float = static_cast<A>(0.5F) != static_cast<A>(0);

// Whether the order shows in the bits: floats alone round.
template <class Codec, class Op>
constexpr bool is_ordered = Op::kRounds && is_float<typename Codec::Accumulator>;

// Of a sum of n: what is stored of it.
template <class Codec, class A>
DEVICE typename Codec::Stored average_of_sum(A sum, int n) {
  if constexpr (is_float<A>)
    return Codec::narrow(sum / static_cast<A>(n));
  else
    return average_of<typename Codec::Number>(sum, n);
}

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
