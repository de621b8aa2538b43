// The reduce operations in kernels, of one number each.
#pragma once

#include "cuda/device.h"
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

}  // namespace pycollective::cuda
