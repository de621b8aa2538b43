// Exact packing by one instruction set: compiled once for each (kernels/levels.h).
#include "kernels/pack/pack.h"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

namespace pycollective::PYCOLLECTIVE_LEVEL {
namespace {
// clang-format off: each needs those before it
#include "kernels/pack/block.inl"
#include "kernels/pack/window.inl"
#include "kernels/pack/fixed.inl"
// clang-format on

// Which codec is for which type. Each writes a block the shortest way it has; raw if none is
// shorter than that.

template <class T>
Extent encode_raw(const Block<T>& block, Header& header, std::byte* rows) {
  std::memcpy(rows, &block, sizeof(block));
  header = {0, kRawMode, 0, 0};
  return {sizeof(block), 0};
}

// Whether a header is of one of the two modes that all codecs have; its extent.
template <class T>
bool plain_extent(Header header, Extent& extent) {
  extent = {header.mode == kRawMode ? sizeof(Block<T>) : 0, 0};
  return (header.mode == kRawMode || header.mode == kZeroMode) && header.base == 0 &&
         header.escaped == 0 && header.marked == 0;
}

template <class T>
void decode_plain(Header header, const std::byte* rows, std::byte* out) {
  if (header.mode == kRawMode)
    std::memcpy(out, rows, sizeof(Block<T>));
  else
    std::memset(out, 0, sizeof(Block<T>));
}

// fp16 and bf16, by the bits of their exponents.
template <int kExponent>
struct Packed16 {
  using Element = std::uint16_t;
  static constexpr std::size_t kHeaderBytes = 3;
  using Coded = Window<Element, kExponent>;

  // Writes at most sizeof(Block<Element>) bytes to each of the two.
  static Extent encode(const Block<Element>& block, Header& header, std::byte* rows,
                       std::byte* tail) {
    header = {0, kZeroMode, 0, 0};
    if (all_zero(block)) return {0, 0};
    typename Coded::Plan plan;
    Coded::plan(block, plan);
    if (plan.bytes() >= sizeof(block)) return encode_raw(block, header, rows);
    Coded::encode(block, plan, rows, tail);
    header = plan.header;
    return plan.extent;
  }

  static bool extent(Header header, Extent& extent) {
    if (!Coded::is_mode(header.mode)) return plain_extent<Element>(header, extent);
    extent = Coded::extent(header);
    return true;
  }

  static bool decode(Header header, const std::byte* rows, const std::byte* tail, std::size_t,
                     std::byte* out) {
    if (Coded::is_mode(header.mode)) return Coded::decode(header, rows, tail, out);
    decode_plain<Element>(header, rows, out);
    return true;
  }
};

// fp32: fixed point for sums of 16-bit numbers, an exponent window for what fills its mantissa.
struct Packed32 {
  using Element = std::uint32_t;
  static constexpr std::size_t kHeaderBytes = 4;
  using Wide = Window<Element, 8>;

  static Extent encode(const Words& block, Header& header, std::byte* rows, std::byte* tail) {
    header = {0, kZeroMode, 0, 0};
    if (all_zero(block)) return {0, 0};
    Fixed::Plan fixed;
    Fixed::plan(block, fixed);
    if (fixed.bytes() > Wide::kRestBytes * kBlock) {  // else no window is shorter
      Wide::Plan wide;
      Wide::plan(block, wide);
      if (wide.bytes() < fixed.bytes() && wide.bytes() < sizeof(block)) {
        Wide::encode(block, wide, rows, tail);
        header = wide.header;
        return wide.extent;
      }
    }
    if (fixed.bytes() >= sizeof(block)) return encode_raw(block, header, rows);
    Fixed::encode(block, fixed, rows, tail);
    header = fixed.header;
    return fixed.extent;
  }

  static bool extent(Header header, Extent& extent) {
    if (Fixed::is_mode(header.mode)) {
      extent = Fixed::extent(header);
      return true;
    }
    if (!Wide::is_mode(header.mode)) return plain_extent<Element>(header, extent);
    extent = Wide::extent(header);
    return header.marked == 0;
  }

  static bool decode(Header header, const std::byte* rows, const std::byte* tail,
                     std::size_t readable, std::byte* out) {
    if (Fixed::is_mode(header.mode)) return Fixed::decode(header, rows, tail, readable, out);
    if (Wide::is_mode(header.mode)) return Wide::decode(header, rows, tail, out);
    decode_plain<Element>(header, rows, out);
    return true;
  }
};

// The payload: all blocks' headers, their rows in ascending order, the elements after the last
// whole block as they are, then the blocks' tails in descending order. Sums over the headers say
// where a block's parts lie: its rows from the end of the headers, its tail from the end of the
// payload. A payload that would be no shorter than the elements is the elements.

template <class T>
std::size_t copy_raw(const void* in, std::size_t count, std::byte* out) {
  if (count != 0) std::memcpy(out, in, count * sizeof(T));
  return count * sizeof(T);
}

template <class Codec>
std::size_t pack(const void* in, std::size_t count, std::byte* out) {
  using T = typename Codec::Element;
  constexpr std::size_t kHeaderBytes = Codec::kHeaderBytes;
  const std::size_t blocks = count / kBlock, raw = count * sizeof(T);
  const std::size_t rest = count % kBlock * sizeof(T);
  const auto* from = static_cast<const std::byte*>(in);
  std::byte* rows = out + blocks * kHeaderBytes;
  std::byte* tail = out + raw;  // of all blocks: grows down, and is moved up to the rows
  for (std::size_t b = 0; b < blocks; ++b, from += sizeof(Block<T>)) {
    Block<T> block;
    copy_vectors<sizeof(block)>(&block, from);
    Block<T> near_the_end;
    std::byte block_tail[sizeof(block)];
    const auto room = static_cast<std::size_t>(tail - rows) - rest;
    const bool roomy = room >= sizeof(block);
    std::byte* to = roomy ? rows : reinterpret_cast<std::byte*>(&near_the_end);
    Header header;
    const Extent extent = Codec::encode(block, header, to, block_tail);
    if (extent.rows + extent.tail > room) return copy_raw<T>(in, count, out);
    if (!roomy) std::memcpy(rows, &near_the_end, extent.rows);
    rows += extent.rows;
    tail -= extent.tail;
    std::memcpy(tail, block_tail, extent.tail);
    std::memcpy(out + b * kHeaderBytes, &header, kHeaderBytes);
  }
  if (rows + rest == tail) return copy_raw<T>(in, count, out);
  if (rest != 0) std::memcpy(rows, from, rest);
  const auto tails = static_cast<std::size_t>(out + raw - tail);
  std::memmove(rows + rest, tail, tails);
  return static_cast<std::size_t>(rows + rest - out) + tails;
}

template <class Codec>
bool unpack(const std::byte* in, std::size_t bytes, void* out, std::size_t count) {
  using T = typename Codec::Element;
  constexpr std::size_t kHeaderBytes = Codec::kHeaderBytes;
  const std::size_t blocks = count / kBlock, raw = count * sizeof(T);
  const std::size_t rest = count % kBlock * sizeof(T);
  auto* to = static_cast<std::byte*>(out);
  if (bytes == raw) return copy_raw<T>(in, count, to), true;
  if (bytes > raw || bytes < blocks * kHeaderBytes + rest) return false;
  const std::byte* rows = in + blocks * kHeaderBytes;
  std::size_t left = bytes - blocks * kHeaderBytes - rest;
  const std::byte* tail = in + bytes;
  for (std::size_t b = 0; b < blocks; ++b, to += sizeof(Block<T>)) {
    Header header{};
    std::memcpy(&header, in + b * kHeaderBytes, kHeaderBytes);
    Extent extent;
    if (!Codec::extent(header, extent) || extent.rows + extent.tail > left) return false;
    tail -= extent.tail;
    if (!Codec::decode(header, rows, tail, in + bytes - tail, to)) return false;
    rows += extent.rows;
    left -= extent.rows + extent.tail;
  }
  if (rest != 0) std::memcpy(to, rows, rest);
  return left == 0;
}

template <class Codec>
Packing packing() {
  return {pack<Codec>, unpack<Codec>};
}

}  // namespace

Packing find_packing(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat16:
      return packing<Packed16<5>>();
    case Dtype::kBFloat16:
      return packing<Packed16<8>>();
    case Dtype::kFloat32:
      return packing<Packed32>();
    default:
      return {};
  }
}

}  // namespace pycollective::PYCOLLECTIVE_LEVEL
