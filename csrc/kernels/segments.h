// Compression of a whole bucket: the loops over a table of segments. pycollective/segments.py says
// what is in a table and in `found`, docs/inside/wire.md what is in a message.
//
// What a row names must be there: addresses, places in messages, entries, words of items. The
// caller's floating-point environment must be the IEEE default: hold a FloatEnvironment.
#pragma once

#include <cstddef>
#include <cstdint>

#include "dtype.h"
#include "kernels/levels.h"
#include "kernels/quantize/quantize.h"
#include "kernels/sparse/sparse.h"

namespace pycollective {

// A row of a table, as it lies.
struct TableRow {
  std::int64_t address, dtype, elements, item, at, k, held_address, left_address, entry;

  template <class T = void>
  T* data() const {
    return reinterpret_cast<T*>(address);
  }
  const float* held() const { return reinterpret_cast<const float*>(held_address); }
  float* left() const { return reinterpret_cast<float*>(left_address); }
  std::size_t count() const { return static_cast<std::size_t>(elements); }
  std::size_t place() const { return static_cast<std::size_t>(at); }
};
constexpr std::size_t kSegmentColumns = sizeof(TableRow) / sizeof(std::int64_t);

// The types that a column `dtype` numbers.
constexpr Dtype kSegmentDtypes[] = {Dtype::kFloat32, Dtype::kFloat16, Dtype::kBFloat16};
constexpr Dtype dtype_of(const TableRow& segment) { return kSegmentDtypes[segment.dtype]; }

struct Table {
  const TableRow* first;
  std::size_t rows;

  const TableRow* begin() const { return first; }
  const TableRow* end() const { return first + rows; }
};

// Words of `found`.
constexpr std::size_t kFoundBad = 0, kFoundNonzero = 4;

// One message of each rank, a row each.
struct RankMessages {
  const std::byte* data;
  std::size_t rows, bytes;  // of a row
};
constexpr std::size_t kZeroBitsAt = 24;  // the byte of a message where the items' bits begin

// Where top-k puts what it takes.
struct TopKOutput {
  std::uint32_t* places;
  void* values;
  Dtype dtype;  // of the values
};

// How many entries top-k has of a row; chunk 0: by tensor.
inline std::size_t entries_of(const TableRow& segment, std::size_t chunk) {
  const auto k = static_cast<std::size_t>(segment.k);
  if (k == 0) return 0;
  if (chunk != 0) return selected_by_chunk(segment.count(), k, chunk);
  return k < segment.count() ? k : segment.count();
}

// `zero_at`: where the words of items that are all zero begin in `found`, or 0 in the first phase,
// which finds out what is zero here.
void quantize_segments(const QuantizeCodec& codec, std::size_t chunk, Table table,
                       std::byte* messages, std::int32_t* found, std::size_t zero_at,
                       SimdLevel level);
void dequantize_segments(const QuantizeCodec& codec, std::size_t chunk, Table table,
                         const RankMessages& messages, float divisor, std::int32_t* found,
                         std::size_t zero_at, SimdLevel level);

void top_k_segments(Table table, std::size_t chunk, const TopKOutput& to, std::byte* messages,
                    std::int32_t* found, SimdLevel level);
void add_segments(Table table, std::byte* messages, std::int32_t* found, SimdLevel level);
// A row of 2^bits bins for each segment.
void histogram_segments(Table table, int shift, int bits, const std::int64_t* prefixes,
                        std::uint32_t* bins, SimdLevel level);
// How many entries; they lie one behind another.
std::size_t select_segments(Table table, const std::int64_t* keys, const std::int64_t* ties,
                            const TopKOutput& to, SimdLevel level);
// `sum` has values of fp32, and places that ascend strictly.
void scatter_segments(Table table, const SparseVector& sum, float divisor, std::int32_t* found,
                      const std::uint8_t* all_zero, SimdLevel level);

void fill_nan(Table table, const std::int32_t* found);
void check_finite(Table table, std::int32_t* found);

}  // namespace pycollective
