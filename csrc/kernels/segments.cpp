#include "kernels/segments.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels/kernels.h"

namespace pycollective {
namespace {

// Asks all numbers at once, in words of 64 bits: does (number & kept) + added have a bit of `seen`?
struct Question {
  std::uint64_t kept, added, seen;
};

std::uint64_t in_each(Dtype dtype, std::uint64_t bits) {
  return size_of(dtype) == 4 ? bits * 0x0000000100000001 : bits * 0x0001000100010001;
}
std::uint64_t sign_of(Dtype dtype) { return std::uint64_t{1} << (8 * size_of(dtype) - 1); }
Question is_not_zero(Dtype dtype) {
  const std::uint64_t magnitude = in_each(dtype, sign_of(dtype) - 1);
  return {magnitude, 0, magnitude};
}
// One more exponent carries into the sign where there is no larger one.
Question is_not_finite(Dtype dtype) {
  const std::uint64_t sign = in_each(dtype, sign_of(dtype));
  return {~sign, in_each(dtype, std::uint64_t{1} << traits_of(dtype).mantissa), sign};
}

// Whether the answer is yes for any number; asks no further then.
bool any(const Question& question, const void* numbers, std::size_t bytes) {
  constexpr std::size_t kWord = 8, kBlock = 1024;
  const auto* at = static_cast<const std::byte*>(numbers);
  const auto look = [&question](const std::byte* from, std::size_t size) {
    std::uint64_t word = 0;
    std::memcpy(&word, from, size);
    return (word & question.kept) + question.added;
  };
  std::uint64_t bits = 0;
  for (; bytes >= kBlock; at += kBlock, bytes -= kBlock) {
    for (std::size_t i = 0; i < kBlock; i += kWord) bits |= look(at + i, kWord);
    if ((bits & question.seen) != 0) return true;
  }
  for (; bytes >= kWord; at += kWord, bytes -= kWord) bits |= look(at, kWord);
  if (bytes != 0) bits |= look(at, bytes);
  return (bits & question.seen) != 0;
}

bool any(Question (*question)(Dtype), const TableRow& segment) {
  const Dtype dtype = dtype_of(segment);
  return any(question(dtype), segment.data(), segment.count() * size_of(dtype));
}

std::int32_t& word_of(std::int32_t* found, std::size_t first, const TableRow& segment) {
  return found[first + static_cast<std::size_t>(segment.item)];
}

void note_nonzero(const TableRow& segment, std::int32_t* found) {
  std::int32_t& nonzero = word_of(found, kFoundNonzero, segment);
  if (nonzero == 0 && any(is_not_zero, segment)) nonzero = 1;
}

// What is not compressed, in fp32.
void copy_segment(const TableRow& segment, std::byte* messages, SimdLevel level) {
  if (segment.count() == 0) return;
  auto* const to = reinterpret_cast<float*>(messages + segment.place());
  if (dtype_of(segment) == Dtype::kFloat32)
    std::memcpy(to, segment.data(), segment.count() * sizeof(float));
  else
    find_accumulate(dtype_of(segment), level)(segment.data(), nullptr, 0, to, segment.count(),
                                              false);
}

void fill_nan(const TableRow& segment) {
  const std::uint64_t nan = traits_of(dtype_of(segment)).nan;
  if (size_of(dtype_of(segment)) == sizeof(std::uint32_t))
    std::fill_n(segment.data<std::uint32_t>(), segment.count(), static_cast<std::uint32_t>(nan));
  else
    std::fill_n(segment.data<std::uint16_t>(), segment.count(), static_cast<std::uint16_t>(nan));
}

void fill_zero(const TableRow& segment) {
  if (segment.count() != 0)
    std::memset(segment.data(), 0, segment.count() * size_of(dtype_of(segment)));
}

// Whether the item's bit is 1 in all ranks' headers.
bool is_zero_everywhere(const RankMessages& messages, std::int64_t item) {
  const std::byte* bits = messages.data + kZeroBitsAt + item / 8;
  for (std::size_t row = 0; row < messages.rows; ++row, bits += messages.bytes)
    if ((*bits >> (item % 8) & std::byte{1}) == std::byte{0}) return false;
  return true;
}

// How the contract combines so many leaves.
void append_recipe(std::size_t leaves, std::vector<std::uint8_t>& recipe) {
  if (leaves == 1) return recipe.push_back(kRecipeTake);
  std::size_t split = 1;
  while (2 * split < leaves) split *= 2;
  append_recipe(split, recipe);
  append_recipe(leaves - split, recipe);
  recipe.push_back(kRecipeCombine);
}

// The average of what is not compressed, from every rank's message.
class Averaging {
 public:
  Averaging(const RankMessages& messages, float divisor, SimdLevel level)
      : messages_(messages), terms_(messages.rows), divisor_(divisor), level_(level) {
    append_recipe(messages.rows, recipe_);
  }
  void operator()(const TableRow& segment) {
    for (std::size_t row = 0; row < terms_.size(); ++row)
      terms_[row] = {messages_.data + row * messages_.bytes + segment.place(), true};
    const Combination what{recipe_.data(), static_cast<int>(recipe_.size()),
                           static_cast<int>(terms_.size()), divisor_, true};
    find_kernels(dtype_of(segment), ReduceOp::kAvg, level_)
        .combine(what, terms_.data(), segment.data(), nullptr, segment.count());
  }

 private:
  const RankMessages messages_;
  std::vector<Term> terms_;
  std::vector<std::uint8_t> recipe_;
  const double divisor_;
  const SimdLevel level_;
};

Gradient gradient_of(const TableRow& segment) {
  return {dtype_of(segment), segment.data(), segment.held(), segment.left(), segment.count()};
}

// Takes entries of a row, whose indices are in place, off its residual.
void take(const Sparse& sparse, const TableRow& segment, const TopKOutput& to, std::size_t entry,
          std::size_t count) {
  std::uint32_t* const places = to.places + entry;
  sparse.take(segment.left(), places, count, to.dtype,
              static_cast<std::byte*>(to.values) + entry * size_of(to.dtype));
  if (segment.at == 0) return;
  for (std::size_t i = 0; i < count; ++i) places[i] += static_cast<std::uint32_t>(segment.at);
}

}  // namespace

void quantize_segments(const QuantizeCodec& codec, std::size_t chunk, Table table,
                       std::byte* messages, std::int32_t* found, std::size_t zero_at,
                       SimdLevel level) {
  for (const TableRow& segment : table) {
    if (zero_at == 0)
      note_nonzero(segment, found);
    else if (word_of(found, zero_at, segment) != 0)
      continue;
    if (segment.k == 0)
      copy_segment(segment, messages, level);
    else if (!codec.find(dtype_of(segment))
                  .quantize(segment.data(), segment.held(), segment.left(), segment.count(), chunk,
                            messages + segment.place()))
      found[kFoundBad] = 1;
  }
}

void dequantize_segments(const QuantizeCodec& codec, std::size_t chunk, Table table,
                         const RankMessages& messages, float divisor, std::int32_t* found,
                         std::size_t zero_at, SimdLevel level) {
  if (found[kFoundBad] != 0) return fill_nan(table, found);
  Averaging average(messages, divisor, level);
  constexpr std::size_t kBlock = std::size_t{1} << 16;  // elements
  for (const TableRow& segment : table) {
    if (zero_at != 0 && is_zero_everywhere(messages, segment.item)) {
      word_of(found, zero_at, segment) = 1;
      fill_zero(segment);
      continue;
    }
    const bool checked = zero_at != 0 || dtype_of(segment) != Dtype::kFloat32;
    if (segment.k == 0) {
      average(segment);
      if (checked && any(is_not_finite, segment)) found[kFoundBad] = 1;
      continue;
    }
    // In blocks: what is looked at is still in the cache.
    const std::size_t most = checked ? kBlock / chunk * chunk : segment.count();
    TableRow part = segment;
    for (std::size_t first = 0; first < segment.count(); first += most) {
      part.elements = static_cast<std::int64_t>(std::min(most, segment.count() - first));
      codec.find(dtype_of(part))
          .dequantize(messages.data + part.place(), messages.rows, messages.bytes, chunk,
                      part.data(), part.count(), divisor);
      if (checked && any(is_not_finite, part)) found[kFoundBad] = 1;
      part.address += static_cast<std::int64_t>(part.count() * size_of(dtype_of(part)));
      part.at += static_cast<std::int64_t>(quantized_bytes(codec, chunk, part.count()));
    }
  }
}

void top_k_segments(Table table, std::size_t chunk, const TopKOutput& to, std::byte* messages,
                    std::int32_t* found, SimdLevel level) {
  const Sparse sparse = find_sparse(level);
  for (const TableRow& segment : table) {
    note_nonzero(segment, found);
    if (segment.k == 0) {
      copy_segment(segment, messages, level);
      continue;
    }
    const auto entry = static_cast<std::size_t>(segment.entry);
    const std::size_t many = entries_of(segment, chunk);
    const auto k = static_cast<std::size_t>(segment.k);
    const std::int64_t taken =
        chunk == 0 ? sparse.top_k(gradient_of(segment), many, to.places + entry)
                   : sparse.top_k_chunks(gradient_of(segment), k, chunk, to.places + entry);
    if (taken < 0)
      found[kFoundBad] = 1;
    else
      take(sparse, segment, to, entry, many);
  }
}

void add_segments(Table table, std::byte* messages, std::int32_t* found, SimdLevel level) {
  const Sparse sparse = find_sparse(level);
  for (const TableRow& segment : table) {
    note_nonzero(segment, found);
    if (segment.k == 0)
      copy_segment(segment, messages, level);
    else if (!sparse.add(gradient_of(segment)))
      found[kFoundBad] = 1;
  }
}

void histogram_segments(Table table, int shift, int bits, const std::int64_t* prefixes,
                        std::uint32_t* bins, SimdLevel level) {
  const Sparse sparse = find_sparse(level);
  for (const TableRow& segment : table) {
    sparse.histogram(segment.left(), segment.count(), shift, bits,
                     static_cast<std::uint32_t>(*prefixes++), bins);
    bins += std::size_t{1} << bits;
  }
}

std::size_t select_segments(Table table, const std::int64_t* keys, const std::int64_t* ties,
                            const TopKOutput& to, SimdLevel level) {
  const Sparse sparse = find_sparse(level);
  std::size_t entry = 0;
  for (const TableRow& segment : table) {
    const std::size_t many =
        sparse.select(segment.left(), segment.count(), static_cast<std::uint32_t>(*keys++),
                      static_cast<std::size_t>(*ties++), to.places + entry, entries_of(segment, 0));
    take(sparse, segment, to, entry, many);
    entry += many;
  }
  return entry;
}

void scatter_segments(Table table, const SparseVector& sum, float divisor, std::int32_t* found,
                      const std::uint8_t* all_zero, SimdLevel level) {
  if (found[kFoundBad] != 0) return fill_nan(table, found);
  const Sparse sparse = find_sparse(level);
  const std::uint32_t *const places = sum.indices, *const last = places + sum.count;
  for (const TableRow& segment : table) {
    if (all_zero[segment.item] != 0) {
      fill_zero(segment);
      continue;
    }
    const std::size_t first = segment.place(), end = first + segment.count();
    const std::uint32_t* const from = std::lower_bound(places, last, first);
    const std::uint32_t* const to = std::lower_bound(from, last, end);
    const SparseVector part{from, static_cast<const float*>(sum.values) + (from - places),
                            static_cast<std::size_t>(to - from)};
    if (!sparse.scatter(part, first, divisor, segment.data(), segment.count(), dtype_of(segment)))
      found[kFoundBad] = 1;
  }
}

void fill_nan(Table table, const std::int32_t* found) {
  if (found[kFoundBad] == 0) return;
  for (const TableRow& segment : table) fill_nan(segment);
}

void check_finite(Table table, std::int32_t* found) {
  for (const TableRow& segment : table)
    if (any(is_not_finite, segment)) found[kFoundBad] = 1;
}

}  // namespace pycollective
