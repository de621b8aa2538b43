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
