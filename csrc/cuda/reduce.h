// The ordered reduce: for each element, the contract's tree over n leaves in registers, one
// rounding. The order and the bits are those of kernels/reduce.inl.
//
//   1. Where all pointers are aligned alike, 16 bytes of each leaf at a time. All loads of a node
//      are issued before the first is used.
//   2. What is before the first whole vector and behind the last, and everything where pointers
//      are not aligned alike: one element at a time.
//
// Up to 8 leaves are one tree of 8, in which nothing is combined with what is absent: absent leaves
// are the last, so that is the contract's order. More are taken in groups of 8, whose nodes are
// merged like the digits of a binary counter: its levels have names, so that they stay in
// registers. 2, 4 and 8 leaves, the common numbers, have code of their own.
#pragma once

#include "cuda/device.h"
#include "cuda/elements.h"
#include "cuda/reduce_operations.h"

namespace pycollective::cuda {

constexpr int kFan = 8;
constexpr int kMostLeaves = kFan * kFan;  // the counter of groups has three digits

// As they are stored, and as they are computed.
template <class Codec, int L>
using Loaded = Lanes<typename Codec::Stored, L>;
template <class Codec, int L>
using Values = Lanes<typename Codec::Accumulator, L>;

template <class Codec, int L>
DEVICE Values<Codec, L> widen(const Loaded<Codec, L>& stored) {
  Values<Codec, L> result;
  UNROLL
  for (int lane = 0; lane < L; ++lane) result.at[lane] = Codec::widen(stored.at[lane]);
  return result;
}

template <class Op, class A, int L>
DEVICE Lanes<A, L> apply(const Lanes<A, L>& a, const Lanes<A, L>& b) {
  Lanes<A, L> result;
  UNROLL
  for (int lane = 0; lane < L; ++lane) result.at[lane] = Op::apply(a.at[lane], b.at[lane]);
  return result;
}

// T[Lo, Hi) of the first `size` of leaves that have been loaded; N is a power of two. Lo < size.
template <class Codec, class Op, int Lo, int Hi, int N, int L>
DEVICE Values<Codec, L> tree(const Loaded<Codec, L> (&leaves)[N], int size) {
  if constexpr (Hi - Lo == 1) {
    return widen<Codec, L>(leaves[Lo]);
  } else {
    constexpr int middle = (Lo + Hi) / 2;
    const Values<Codec, L> left = tree<Codec, Op, Lo, middle, N, L>(leaves, size);
    if (size <= middle) return left;
    return apply<Op>(left, tree<Codec, Op, middle, Hi, N, L>(leaves, size));
  }
}

// Leaves [first, first + size), L elements from byte `at` on; `leaf(i)` is where leaf i begins.
template <class Codec, int N, int L, class Leaf>
DEVICE void load_leaves(Loaded<Codec, L> (&loaded)[N], const Leaf& leaf, int first, int size,
                        std::uint64_t at) {
  UNROLL
  for (int i = 0; i < N; ++i)
    if (i < size)
      loaded[i] = load<typename Codec::Stored, L>(static_cast<const char*>(leaf(first + i)) + at);
}

// The node of `size` leaves, 1 to N.
template <class Codec, class Op, int N, int L, class Leaf>
DEVICE Values<Codec, L> node(const Leaf& leaf, int first, int size, std::uint64_t at) {
  Loaded<Codec, L> loaded[N] = {};
  load_leaves<Codec, N, L>(loaded, leaf, first, size, at);
  return tree<Codec, Op, 0, N, N, L>(loaded, size);
}

// The root of any number of leaves, in the order.
template <class Codec, class Op, int L, class Leaf>
DEVICE Values<Codec, L> ordered_root(const Leaf& leaf, int n, std::uint64_t at) {
  Values<Codec, L> ones = {}, twos = {}, fours = {};
  for (int g = 0;; ++g) {
    const int left = n - g * kFan;
    const bool last = left <= kFan;
    auto value = node<Codec, Op, kFan, L>(leaf, g * kFan, last ? left : kFan, at);
    // Of groups before the last, those that fill a level carry; the last takes all that wait.
    const bool carry_ones = (g & 1) != 0;
    const bool carry_twos = (last || carry_ones) && (g & 2) != 0;
    if (carry_ones) value = apply<Op>(ones, value);
    if (carry_twos) value = apply<Op>(twos, value);
    if (last) return (g & 4) != 0 ? apply<Op>(fours, value) : value;
    if (carry_twos)
      fours = value;
    else if (carry_ones)
      twos = value;
    else
      ones = value;
  }
}

// Where any order gives the same bits.
template <class Codec, class Op, int L, class Leaf>
DEVICE Values<Codec, L> folded_root(const Leaf& leaf, int n, std::uint64_t at) {
  constexpr int kTogether = 4;
  auto value = node<Codec, Op, kTogether, L>(leaf, 0, n, at);
  for (int first = kTogether; first < n; first += kTogether)
    value = apply<Op>(value, node<Codec, Op, kTogether, L>(leaf, first, n - first, at));
  return value;
}

template <class Codec, class Op, int L, class Leaf>
DEVICE Values<Codec, L> root(const Leaf& leaf, int n, std::uint64_t at) {
  if constexpr (is_ordered<Codec, Op>)
    return ordered_root<Codec, Op, L>(leaf, n, at);
  else
    return folded_root<Codec, Op, L>(leaf, n, at);
}

// Where results go.
struct Target {
  char* out;
  char* copy;   // or null
  int divisor;  // of averages of integers; 1: of sums of some leaves, which are not divided yet
};

// Divided if they are averages, of floats by n; rounded once.
template <class Codec, bool kAverage, int L>
DEVICE void put(const Target& target, std::uint64_t at, const Values<Codec, L>& value, int n) {
  Loaded<Codec, L> result;
  UNROLL
  for (int lane = 0; lane < L; ++lane) {
    if constexpr (kAverage)
      result.at[lane] = average_of_sum<Codec>(
          value.at[lane], is_float<typename Codec::Accumulator> ? n : target.divisor);
    else
      result.at[lane] = Codec::narrow(value.at[lane]);
  }
  store<typename Codec::Stored, L>(target.out + at, result);
  if (target.copy != nullptr) store<typename Codec::Stored, L>(target.copy + at, result);
}

// Vectors i, i + stride, ..., kTogether of them, of N leaves: all loads, then all else.
template <class Codec, class Op, bool kAverage, int N, int kTogether, class Leaf>
DEVICE void reduce_together(const Leaf& leaf, const Target& target, std::uint64_t begin,
                            std::uint64_t i, std::uint64_t stride) {
  constexpr int kLanes = kStepLanes<Codec>;
  Loaded<Codec, kLanes> loaded[kTogether][N];
  UNROLL
  for (int k = 0; k < kTogether; ++k)
    load_leaves<Codec, N, kLanes>(loaded[k], leaf, 0, N,
                                  begin + (i + k * stride) * kStepBytes<Codec>);
  UNROLL
  for (int k = 0; k < kTogether; ++k)
    put<Codec, kAverage, kLanes>(target, begin + (i + k * stride) * kStepBytes<Codec>,
                                 tree<Codec, Op, 0, N, N, kLanes>(loaded[k], N), N);
}

// `whole` vectors from byte `begin` on, of N leaves: of few, several vectors together, so that
// enough bytes are on their way.
template <class Codec, class Op, bool kAverage, int N, class Leaf>
DEVICE void reduce_vectors_of(const Leaf& leaf, const Target& target, std::uint64_t begin,
                              std::uint64_t whole, Share share) {
  constexpr int kTogether = kFan / N;
  std::uint64_t i = share.index;
  if constexpr (kTogether > 1)
    for (; i + (kTogether - 1) * share.stride < whole; i += kTogether * share.stride)
      reduce_together<Codec, Op, kAverage, N, kTogether>(leaf, target, begin, i, share.stride);
  for (; i < whole; i += share.stride)
    reduce_together<Codec, Op, kAverage, N, 1>(leaf, target, begin, i, share.stride);
}

template <class Codec, class Op, bool kAverage, class Leaf>
DEVICE void reduce_vectors(const Leaf& leaf, int n, const Target& target, std::uint64_t begin,
                           std::uint64_t whole, Share share) {
  if constexpr (is_ordered<Codec, Op>) {
    switch (n) {
      case 2:
        return reduce_vectors_of<Codec, Op, kAverage, 2>(leaf, target, begin, whole, share);
      case 4:
        return reduce_vectors_of<Codec, Op, kAverage, 4>(leaf, target, begin, whole, share);
      case 8:
        return reduce_vectors_of<Codec, Op, kAverage, 8>(leaf, target, begin, whole, share);
      default:
        break;
    }
  }
  constexpr int kLanes = kStepLanes<Codec>;
  for (std::uint64_t i = share.index; i < whole; i += share.stride) {
    const std::uint64_t at = begin + i * kStepBytes<Codec>;
    put<Codec, kAverage, kLanes>(target, at, root<Codec, Op, kLanes>(leaf, n, at), n);
  }
}

// Bytes before the first 16-byte boundary; `size` where the pointers do not share one.
template <class Leaf>
DEVICE std::uint64_t bytes_before_vectors(const Leaf& leaf, int n, const Target& target,
                                          std::uint64_t size, std::uint64_t element) {
  const std::uint64_t misaligned = address_of(target.out) % kVectorBytes;
  const std::uint64_t before = (kVectorBytes - misaligned) % kVectorBytes;
  bool alike = misaligned % element == 0 && before <= size;
  if (target.copy != nullptr) alike &= address_of(target.copy) % kVectorBytes == misaligned;
  for (int i = 0; i < n; ++i) alike &= address_of(leaf(i)) % kVectorBytes == misaligned;
  return alike ? before : size;
}

// `count` elements of the n leaves, `leaf(i)` being where leaf i begins. Where whole vectors can be
// combined as another type (words, for what is bitwise), `Vectors` says how.
template <class Codec, class Op, bool kAverage, class Vectors, class Leaf>
DEVICE void reduce(const Leaf& leaf, int n, const Target& target, std::uint64_t count,
                   Share share) {
  constexpr std::uint64_t kElement = sizeof(typename Codec::Stored);
  const std::uint64_t size = count * kElement;
  const std::uint64_t before = bytes_before_vectors(leaf, n, target, size, kElement);
  const std::uint64_t whole = (size - before) / kStepBytes<Vectors>;
  reduce_vectors<Vectors, Op, kAverage>(leaf, n, target, before, whole, share);
  const std::uint64_t in_vectors = whole * kStepBytes<Vectors>;
  for (std::uint64_t i = share.index; i < (size - in_vectors) / kElement; i += share.stride) {
    const std::uint64_t at = i * kElement + (i * kElement < before ? 0 : in_vectors);
    put<Codec, kAverage, 1>(target, at, root<Codec, Op, 1>(leaf, n, at), n);
  }
}

}  // namespace pycollective::cuda
