// A schedule's combinations in kernels: operands that are leaves, in the stored type, or nodes, in
// the accumulator's, into a node or the finished root. The bits are those of kernels/combine.inl.
//
// What gives the same bits in any order is a reduction (reduce.h), and so is what combines all
// leaves. Two operands, the common case of all else, have a loop of their own; more follow a
// recipe, whose stack is a few named registers that shift.
#pragma once

#include "cuda/program_parameters.h"
#include "cuda/reduce.h"

namespace pycollective::cuda {

// An operand, and how many combinations follow its taking.
struct Operand {
  const char* data;
  bool is_node;
  std::uint32_t combinations;
};

// `leaves`: of the whole order; averages divide by it.
struct Combined {
  Target target;
  std::uint64_t count;
  int leaves;
  bool finish;
};

template <bool kValue>
struct Truth {
  static constexpr bool value = kValue;
};

template <class Codec>
constexpr bool kWideNodes = sizeof(typename Codec::Accumulator) != sizeof(typename Codec::Stored);

template <class A, int L>
DEVICE Lanes<A, L> load_node(const char* from) {
  if constexpr (L == 1) {
    return load_element<A>(from);
  } else {
    constexpr int kEach = kVectorLanes<A>;
    Lanes<A, L> value;
    UNROLL
    for (int part = 0; part < L / kEach; ++part) {
      const auto vector = load_vector<A>(from + part * kVectorBytes);
      UNROLL
      for (int lane = 0; lane < kEach; ++lane) value.at[part * kEach + lane] = vector.at[lane];
    }
    return value;
  }
}

template <class A, int L>
DEVICE void store_node(char* to, const Lanes<A, L>& value) {
  if constexpr (L == 1) {
    store_element<A>(to, value);
  } else {
    constexpr int kEach = kVectorLanes<A>;
    UNROLL
    for (int part = 0; part < L / kEach; ++part) {
      Lanes<A, kEach> vector;
      UNROLL
      for (int lane = 0; lane < kEach; ++lane) vector.at[lane] = value.at[part * kEach + lane];
      store_vector<A>(to + part * kVectorBytes, vector);
    }
  }
}

// L elements of an operand from element i on.
template <class Codec, bool kNode, int L>
DEVICE Values<Codec, L> take(const char* data, std::uint64_t i) {
  using T = typename Codec::Stored;
  using A = typename Codec::Accumulator;
  if constexpr (kNode && kWideNodes<Codec>)
    return load_node<A, L>(data + i * sizeof(A));
  else
    return widen<Codec, L>(load<T, L>(data + i * sizeof(T)));
}

template <class Codec, int L>
DEVICE Values<Codec, L> take(const Operand& operand, std::uint64_t i) {
  if constexpr (kWideNodes<Codec>)
    if (operand.is_node) return take<Codec, true, L>(operand.data, i);
  return take<Codec, false, L>(operand.data, i);
}

template <class Codec, bool kAverage, int L>
DEVICE void put_combined(const Combined& what, std::uint64_t i, const Values<Codec, L>& value) {
  using A = typename Codec::Accumulator;
  if (what.finish) {
    put<Codec, kAverage, L>(what.target, i * sizeof(typename Codec::Stored), value, what.leaves);
    return;
  }
  store_node<A, L>(what.target.out + i * sizeof(A), value);
  if (what.target.copy != nullptr) store_node<A, L>(what.target.copy + i * sizeof(A), value);
}

// `end` elements, in vectors, of two operands: all loads of two steps, then all else. (Of wide
// nodes one step has as many.)
template <class Codec, class Op, bool kAverage, bool kNodeA, bool kNodeB>
DEVICE void combine_two(const char* a, const char* b, const Combined& what, std::uint64_t end,
                        Share share) {
  constexpr int kTogether = kWideNodes<Codec> ? 1 : 2;
  constexpr int L = kStepLanes<Codec>;
  const std::uint64_t stride = share.stride * L;
  std::uint64_t i = share.index * L;
  for (; i + (kTogether - 1) * stride < end; i += kTogether * stride) {
    Values<Codec, L> left[kTogether], right[kTogether];
    UNROLL
    for (int k = 0; k < kTogether; ++k) {
      left[k] = take<Codec, kNodeA, L>(a, i + k * stride);
      right[k] = take<Codec, kNodeB, L>(b, i + k * stride);
    }
    UNROLL
    for (int k = 0; k < kTogether; ++k)
      put_combined<Codec, kAverage, L>(what, i + k * stride, apply<Op>(left[k], right[k]));
  }
  for (; i < end; i += stride)
    put_combined<Codec, kAverage, L>(
        what, i, apply<Op>(take<Codec, kNodeA, L>(a, i), take<Codec, kNodeB, L>(b, i)));
}

// The root of the operands, `operand(i)` each, from element i on.
template <class Codec, class Op, int L, class Operands>
DEVICE Values<Codec, L> evaluate(const Operands& operand, int count, std::uint64_t i) {
  static_assert(kMostKept == 6, "registers with names");
  Values<Codec, L> kept0 = {}, kept1 = {}, kept2 = {}, kept3 = {}, kept4 = {}, kept5 = {};
  Operand taken = operand(0);
  auto value = take<Codec, L>(taken, i);
  for (int next = 1;; ++next) {
    for (std::uint32_t k = taken.combinations; k > 0; --k) {
      value = apply<Op>(kept0, value);
      kept0 = kept1, kept1 = kept2, kept2 = kept3, kept3 = kept4, kept4 = kept5;
    }
    if (next >= count) return value;
    kept5 = kept4, kept4 = kept3, kept3 = kept2, kept2 = kept1, kept1 = kept0, kept0 = value;
    taken = operand(next);
    value = take<Codec, L>(taken, i);
  }
}

template <class Codec, class Op, bool kAverage, int L, class Operands>
DEVICE void combine_more(const Operands& operand, int count, const Combined& what,
                         std::uint64_t first, std::uint64_t end, Share share) {
  for (std::uint64_t i = first + share.index * L; i < end; i += share.stride * L)
    put_combined<Codec, kAverage, L>(what, i, evaluate<Codec, Op, L>(operand, count, i));
}

// Where order shows. Vectors where everything is aligned to them, which what lies in slots is;
// elements at the end, and of what is not.
template <class Codec, class Op, bool kAverage, class Operands>
DEVICE void combine_ordered(const Operands& operand, int count, const Combined& what, Share share) {
  using A = typename Codec::Accumulator;
  constexpr int kLanes = kStepLanes<Codec>;
  std::uint64_t places = address_of(what.target.out) | address_of(what.target.copy);
  for (int i = 0; i < count; ++i) places |= address_of(operand(i).data);
  const std::uint64_t whole =
      places % kVectorBytes == 0 ? what.count / kLanes * kLanes : std::uint64_t{0};
  if (whole < what.count)
    combine_more<Codec, Op, kAverage, 1>(operand, count, what, whole, what.count, share);
  if (count != 2)
    return combine_more<Codec, Op, kAverage, kVectorLanes<A>>(operand, count, what, 0, whole,
                                                              share);
  const Operand a = operand(0), b = operand(1);
  const auto two = [&](auto a_is_node, auto b_is_node) {
    combine_two<Codec, Op, kAverage, decltype(a_is_node)::value, decltype(b_is_node)::value>(
        a.data, b.data, what, whole, share);
  };
  if constexpr (kWideNodes<Codec>) {
    if (a.is_node && b.is_node) return two(Truth<true>{}, Truth<true>{});
    if (a.is_node) return two(Truth<true>{}, Truth<false>{});
    if (b.is_node) return two(Truth<false>{}, Truth<true>{});
  }
  two(Truth<false>{}, Truth<false>{});
}

// `leaf(i)` is where operand i lies. `all_leaves`: they are those of the whole order.
template <class Codec, class Op, bool kAverage, class Vectors, class Leaf, class Operands>
DEVICE void combine(const Leaf& leaf, const Operands& operand, int count, bool all_leaves,
                    const Combined& what, Share share) {
  if constexpr (is_ordered<Codec, Op>)
    if (!all_leaves) return combine_ordered<Codec, Op, kAverage>(operand, count, what, share);
  reduce<Codec, Op, kAverage, Vectors>(leaf, count, what.target, what.count, share);
}

}  // namespace pycollective::cuda
