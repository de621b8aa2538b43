// Top-k selection with error feedback, and sums of what was selected. The bits are the same at each
// level. docs/inside/wire.md says what packed indices are, byte by byte.
//
// The order of elements: |c| descending, by the 31 bits of the magnitude (the key), then the index
// ascending. Numbers are fp32; x and values are fp32, fp16 or bf16. Arrays may have any alignment,
// and hold fewer than 2^32 elements. The caller's floating-point environment must be the IEEE
// default: hold a FloatEnvironment.
#pragma once

#include <cstddef>
#include <cstdint>

#include "dtype.h"
#include "kernels/levels.h"

namespace pycollective {

// A rank's gradient. left = x + held; `held` may be null: nothing is held. `left` does not overlap
// `held`; it may be `x` itself, and does not overlap it otherwise.
struct Gradient {
  Dtype dtype;  // of x
  const void* x;
  const float* held;
  float* left;
  std::size_t count;
};

constexpr std::int64_t kNotFinite = -1;  // an element of x + held is not: outputs hold anything

// The largest chunk, in elements; a chunk is a multiple of kChunkStep.
constexpr std::size_t kLargestChunk = 65536;
constexpr std::size_t kChunkStep = 64;

// How many are selected of a last chunk of `count` elements, if k are of each whole one.
constexpr std::size_t selected_of(std::size_t count, std::size_t k, std::size_t chunk) {
  return (k * count + chunk - 1) /
         chunk;  // at least 1, and no more than `count`, for 1 <= k <= chunk
}
constexpr std::size_t selected_by_chunk(std::size_t count, std::size_t k, std::size_t chunk) {
  return count / chunk * k + selected_of(count % chunk, k, chunk);
}

// Packed indices take no more bytes than this. Of all widths the best is taken: it is no worse than
// 14, nor than one for the widest gap, behind which unary parts are 3 bits an index at most. Each
// block has a header, and ends in two bytes.
constexpr std::size_t packed_indices_bound(std::size_t count, std::uint64_t size) {
  const std::uint64_t places = 15 * std::uint64_t{count} + size / 16384,
                      gaps = 35 * std::uint64_t{count};
  const std::uint64_t blocks = (std::uint64_t{count} + 127) / 128;
  return static_cast<std::size_t>(1 + 4 * blocks + ((places < gaps ? places : gaps) + 7) / 8);
}

// One rank's sparse vector: `count` places, ascending strictly, and their values.
struct SparseVector {
  const std::uint32_t* indices;
  const void* values;
  std::size_t count;
};

struct Sparse {
  // left = x + held. False if one of these is not finite.
  bool (*add)(const Gradient& gradient);

  // add(), then the indices of the first k elements in the order, ascending; how many, or
  // kNotFinite. `indices` has room for as many and no more.
  std::int64_t (*top_k)(const Gradient& gradient, std::size_t k, std::uint32_t* indices);
  // The same of each chunk: selected_by_chunk() in all.
  std::int64_t (*top_k_chunks)(const Gradient& gradient, std::size_t k, std::size_t chunk,
                               std::uint32_t* indices);

  // Where key >> (shift + bits) == prefix: bins[(key >> shift) & (2^bits - 1)] += 1.
  void (*histogram)(const float* left, std::size_t count, int shift, int bits, std::uint32_t prefix,
                    std::uint32_t* bins);
  // The indices of all with a key above `key` and of the first `ties` that have it, ascending, up
  // to `room` of them; how many.
  std::size_t (*select)(const float* left, std::size_t count, std::uint32_t key, std::size_t ties,
                        std::uint32_t* indices, std::size_t room);
  // For each index in turn: value = left[i] in `dtype`, rounded to nearest even, never past the
  // largest finite number; left[i] -= value. Indices are below left's length.
  void (*take)(float* left, const std::uint32_t* indices, std::size_t count, Dtype dtype,
               void* values);

  // Whether indices ascend strictly, and are below `size`.
  bool (*ascends)(const std::uint32_t* indices, std::size_t count, std::uint64_t size);

  // `indices` ascend strictly. Bytes; `out` has room for packed_indices_bound().
  std::size_t (*pack)(const std::uint32_t* indices, std::size_t count, std::byte* out);
  // False unless the payload is of `count` indices that ascend strictly below `size`, to its last
  // byte: `indices` then hold anything. Nothing outside of either is touched, whatever it holds.
  bool (*unpack)(const std::byte* payload, std::size_t bytes, std::uint64_t size,
                 std::uint32_t* indices, std::size_t count);

  // The sum of n sparse vectors in the contract's order; an absent element adds nothing. Returns
  // how many places the sum has. The outputs have room for all vectors' places together. Every NaN
  // becomes fp32's one. Allocates one and a half times as much.
  std::size_t (*sum)(const SparseVector* vectors, std::size_t n, Dtype dtype,
                     std::uint32_t* out_indices, float* out_values);
  // out = 0 but out[indices - first] = values / divisor, rounded once to the type; returns whether
  // all are finite. Values are fp32. Indices ascend strictly from `first` on, and are below first +
  // size, where `size` is the length of `out`.
  bool (*scatter)(const SparseVector& vector, std::uint64_t first, float divisor, void* out,
                  std::size_t size, Dtype dtype);
};

PYCOLLECTIVE_OF_EACH_LEVEL(Sparse find_sparse())

inline Sparse find_sparse(SimdLevel level) { return PYCOLLECTIVE_AT_LEVEL(level, find_sparse()); }

}  // namespace pycollective
