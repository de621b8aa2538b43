// Reductions on the CPU, with the bits of pycollective/reference.py.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/levels.h"
#include "types.h"

namespace pycollective {

// Combines the n leaves of `count` elements each, element by element, in the contract's order:
// out[i] = finish(T[0, n) over inputs[0..n)[i]), with one rounding at the end.
//
//   inputs   n pointers; inputs[i] is leaf i. Any alignment.
//   n        number of leaves, 1 to kCountableRanks.
//   divisor  of `avg`: n, or where leaves are sums of some, any above 0; of integers a whole one.
//   out      may be exactly one of the inputs; no other overlap.
//   copy     where a second copy of the result goes, or nullptr; may be exactly one of the inputs,
//            another than `out`; no other overlap.
//   count    elements; 0 is allowed.
//
// The caller's floating-point environment must be the IEEE default: hold a FloatEnvironment.
using ReduceFn = void (*)(const void* const* inputs, int n, double divisor, void* out, void* copy,
                          std::size_t count);

// An operand: a leaf, in the stored type, or a node, in the accumulator's type (`node_size`).
struct Term {
  const void* data;
  bool is_node;
};

// How a node is made of its operands, which ascend: a recipe in postfix order.
constexpr std::uint8_t kRecipeTake = 0;     // take the next operand
constexpr std::uint8_t kRecipeCombine = 1;  // combine the last two
constexpr int kMostPending = 16;            // operands that wait: the order's depth, and more
struct Combination {
  const std::uint8_t* recipe;
  int length;
  int terms;       // operands; at most kMostPending of them wait to be combined
  double divisor;  // of `avg`: the leaves of the whole order, or a number that the caller chose
  bool finish;     // the node is the root: divide and round
};

// Combines `count` elements of each term into `out`, and into `copy` if it is not null: a node, or
// the result if `finish`. `out` may be exactly one of the terms; no other overlap. Where a node is
// written there is room for a multiple of kNodeRoom elements.
using CombineFn = void (*)(const Combination& what, const Term* terms, void* out, void* copy,
                           std::size_t count);
constexpr std::size_t kNodeRoom = 32;

// Adds a leaf and the nodes that it completes, nearest first, to the node that they make, in fp32:
//
//   out[i] = ((leaf[i] + nodes[0][i]) + nodes[1][i]) + ...
//
// That is the order, since a + b has the bits of b + a (but for NaNs, of which the end makes one).
// `out` may be exactly one of the nodes; no other overlap. Any alignment; nothing is touched beyond
// `count` elements. `streaming`: `out` is written past the caches.
using AccumulateFn = void (*)(const void* leaf, const float* const* nodes, int n, float* out,
                              std::size_t count, bool streaming);

// The sum of the squares of `rows` rows of `length` elements each, in fp64, by the contract's order
// of a norm: T[0, rows) over the rows' sums, so that of a node's rows it is that node. `rows` is 1
// or more; a row may be empty, which is +0. Any alignment.
using SquaresFn = double (*)(const void* data, std::size_t rows, std::size_t length);

struct Kernels {
  ReduceFn reduce = nullptr;
  CombineFn combine = nullptr;
};

PYCOLLECTIVE_OF_EACH_LEVEL(Kernels find_kernels(Dtype dtype, ReduceOp op))

PYCOLLECTIVE_OF_EACH_LEVEL(AccumulateFn find_accumulate(Dtype leaf))

PYCOLLECTIVE_OF_EACH_LEVEL(SquaresFn find_squares(Dtype dtype))

// Null where `dtype` is no float.
inline SquaresFn find_squares(Dtype dtype, SimdLevel level) {
  return PYCOLLECTIVE_AT_LEVEL(level, find_squares(dtype));
}

// Null where `leaf` is no float that fp32 holds.
inline AccumulateFn find_accumulate(Dtype leaf, SimdLevel level) {
  return PYCOLLECTIVE_AT_LEVEL(level, find_accumulate(leaf));
}

// Null where is_defined(dtype, op) is false.
inline Kernels find_kernels(Dtype dtype, ReduceOp op, SimdLevel level) {
  if (!is_defined(dtype, op)) return {};
  return PYCOLLECTIVE_AT_LEVEL(level, find_kernels(dtype, op));
}

// While it lives, its thread rounds to nearest even and keeps subnormals (no FTZ, no DAZ), whatever
// the host program has set. The destructor restores the host's state.
class FloatEnvironment {
 public:
  FloatEnvironment();
  ~FloatEnvironment();
  FloatEnvironment(const FloatEnvironment&) = delete;
  FloatEnvironment& operator=(const FloatEnvironment&) = delete;

 private:
  unsigned long saved_;
};

}  // namespace pycollective
