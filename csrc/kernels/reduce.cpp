// The reductions of one instruction set: compiled once for each (levels.h).
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kernels/copy.h"
#include "kernels/kernels.h"
#include "numerics.h"

namespace pycollective::PYCOLLECTIVE_LEVEL {
namespace {
// clang-format off: each needs those before it
#include "kernels/lanes.inl"
#include "kernels/reduce.inl"
#include "kernels/combine.inl"
#include "kernels/accumulate.inl"
#include "kernels/squares.inl"
// clang-format on

template <class Codec, class Op, bool kAverage = false>
Kernels ordered() {
  return {reduce_ordered<Codec, Op, kAverage>, combine_ordered<Codec, Op, kAverage>};
}

template <class Codec, class Op>
Kernels folded() {
  return {reduce_folded<Codec, Op>, combine_folded<Codec, Op>};
}

// The codecs are what the table says; so a type of another width cannot get another's kernels.
template <Dtype kType>
constexpr bool fits() {
  using Codec = CodecOf<kType>;
  return sizeof(typename Codec::Stored) == traits_of(kType).size &&
         sizeof(typename Codec::Accumulator) == traits_of(kType).accumulator;
}

template <class Codec>
Kernels find_float(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return ordered<Codec, Sum>();
    case ReduceOp::kAvg:
      return ordered<Codec, Sum, true>();
    case ReduceOp::kProd:
      return ordered<Codec, Product>();
    case ReduceOp::kMin:
      return folded<Codec, Minimum>();
    case ReduceOp::kMax:
      return folded<Codec, Maximum>();
    default:
      return {};
  }
}

// Of bool the bytes are 0 and 1: the least is their and, the greatest their or.
template <class T>
Kernels find_integer(ReduceOp op) {
  using U = std::make_unsigned_t<T>;
  switch (op) {
    case ReduceOp::kSum:
      return folded<Plain<U>, Sum>();
    case ReduceOp::kAvg:
      return {reduce_averages<T>, combine_averages<T>};
    case ReduceOp::kProd:
      return folded<Plain<U>, Product>();
    case ReduceOp::kMin:
      return folded<Plain<T>, Least>();
    case ReduceOp::kMax:
      return folded<Plain<T>, Greatest>();
    case ReduceOp::kBand:
      return folded<Plain<U>, And>();
    case ReduceOp::kBor:
      return folded<Plain<U>, Or>();
    case ReduceOp::kBxor:
      return folded<Plain<U>, Xor>();
    default:
      return {};
  }
}

template <Dtype kType>
Kernels find_of(ReduceOp op) {
  static_assert(fits<kType>());
  if constexpr (traits_of(kType).numbers == Numbers::kFloat)
    return find_float<CodecOf<kType>>(op);
  else
    return find_integer<typename CodecOf<kType>::Stored>(op);
}

template <Dtype kType>
SquaresFn squares_of() {
  if constexpr (traits_of(kType).numbers == Numbers::kFloat) return sum_squares<kType>;
  return nullptr;
}

template <Dtype kType>
AccumulateFn accumulation_of() {
  if constexpr (traits_of(kType).numbers == Numbers::kFloat &&
                traits_of(kType).accumulator == sizeof(float))
    return accumulate<CodecOf<kType>>;
  return nullptr;
}

}  // namespace

Kernels find_kernels(Dtype dtype, ReduceOp op) {
  switch (dtype) {
#define PYCOLLECTIVE_CASE(X, numbers, type, ...) \
  case Dtype::type:                              \
    return find_of<Dtype::type>(op);
    PYCOLLECTIVE_EACH_DTYPE(PYCOLLECTIVE_CASE, )
#undef PYCOLLECTIVE_CASE
  }
  return {};
}

AccumulateFn find_accumulate(Dtype leaf) {
  switch (leaf) {
#define PYCOLLECTIVE_CASE(X, numbers, type, ...) \
  case Dtype::type:                              \
    return accumulation_of<Dtype::type>();
    PYCOLLECTIVE_EACH_DTYPE(PYCOLLECTIVE_CASE, )
#undef PYCOLLECTIVE_CASE
  }
  return nullptr;
}

SquaresFn find_squares(Dtype dtype) {
  switch (dtype) {
#define PYCOLLECTIVE_CASE(X, numbers, type, ...) \
  case Dtype::type:                              \
    return squares_of<Dtype::type>();
    PYCOLLECTIVE_EACH_DTYPE(PYCOLLECTIVE_CASE, )
#undef PYCOLLECTIVE_CASE
  }
  return nullptr;
}

}  // namespace pycollective::PYCOLLECTIVE_LEVEL
