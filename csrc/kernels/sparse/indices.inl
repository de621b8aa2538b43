// A block of up to 128 indices as gaps. A gap is how many places lie between an index and the one
// before it. Its lowest `width` bits are written as they are, the rest in unary. A block whose gaps
// are all 0 takes no bytes. docs/inside/wire.md has the bytes.

constexpr std::size_t kBlock = 128;
constexpr std::size_t kHeaderBytes = 2;
constexpr int kWidest = 31;

// Of a block's body.
constexpr std::size_t low_bytes(std::size_t count, int width) {
  return (count * static_cast<std::size_t>(width) + 7) / 8;
}
constexpr std::size_t kMostUnary = 3 * kBlock / 8;
constexpr std::size_t kMostLow = low_bytes(kBlock, kWidest);
constexpr std::size_t kSpare = 64;  // bytes behind a block's body that may be touched
constexpr std::size_t kBodyRoom = kMostUnary + kMostLow + kSpare;

// Sum of the unary parts, bits.
inline std::uint64_t shifted_sum(const std::uint32_t* gaps, std::size_t count, int width) {
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < count; ++i) sum += gaps[i] >> width;
  return sum;
}

// The narrowest of the widths with the fewest bits. The bits are convex in the width: one more bit
// saves sum(ceil(unary / 2)), which falls with the width. So going downhill from any guess finds
// the minimum. There the unary parts are at most 2 bits an index.
inline int find_width(const std::uint32_t* gaps, std::size_t count) {
  int width = 0;
  std::uint64_t sum = shifted_sum(gaps, count, 0);
  for (std::uint64_t mean = sum / count; mean > 2 && width < kWidest; mean /= 2) ++width;
  sum = shifted_sum(gaps, count, width);
  while (width < kWidest) {
    const std::uint64_t next = shifted_sum(gaps, count, width + 1);
    if (sum - next <= count) break;
    sum = next;
    ++width;
  }
  while (width > 0) {
    const std::uint64_t next = shifted_sum(gaps, count, width - 1);
    if (next - sum > count) break;
    sum = next;
    --width;
  }
  return width;
}

// Writes a body, and maybe spare bytes behind it, to `out`, which has kBodyRoom; its bytes.
inline std::size_t encode_gaps(const std::uint32_t* gaps, std::size_t count, std::byte* header,
                               std::byte* out) {
  if (shifted_sum(gaps, count, 0) == 0) {  // a run
    header[0] = header[1] = std::byte{0};
    return 0;
  }
  const int width = find_width(gaps, count);
  std::uint64_t unary[kMostUnary / 8 + 1] = {};
  std::size_t bit = 0;
  for (std::size_t i = 0; i < count; ++i) {
    bit += gaps[i] >> width;
    unary[bit / 64] |= std::uint64_t{1} << bit % 64;
    ++bit;
  }
  const std::size_t unary_bytes = (bit + 7) / 8;
  std::memcpy(out, unary, kMostUnary);
  header[0] = static_cast<std::byte>(width);
  header[1] = static_cast<std::byte>(unary_bytes);
  std::byte* low = out + unary_bytes;
  const std::uint32_t mask = (1U << width) - 1;
  std::uint64_t bits = 0;
  int filled = 0;
  for (std::size_t i = 0; i < count; ++i) {
    bits |= std::uint64_t{gaps[i] & mask} << filled;
    filled += width;
    std::memcpy(low, &bits, 8);
    low += filled / 8;
    bits >>= filled / 8 * 8;
    filled %= 8;
  }
  return unary_bytes + low_bytes(count, width);
}

// Reads a body whose unary parts have so many bytes; kSpare bytes behind it can be read. `next` is
// the least that the block's first index can be, and becomes that of the next block. False if the
// unary parts are not of exactly `count` gaps, spare bits are not 0, or an index is not below
// `size`.
inline bool decode_gaps(const std::byte* body, std::size_t unary_bytes, int width,
                        std::size_t count, std::uint64_t size, std::uint64_t& next,
                        std::uint32_t* indices) {
  if (unary_bytes == 0) {  // a run
    if (width != 0 || next + count > size) return false;
    for (std::size_t i = 0; i < count; ++i) indices[i] = static_cast<std::uint32_t>(next + i);
    next += count;
    return true;
  }
  std::uint64_t unary[kMostUnary / 8 + 1] = {};
  std::memcpy(unary, body, unary_bytes);
  const std::byte* const low = body + unary_bytes;
  const std::uint64_t mask = (1U << width) - 1;
  const std::size_t used = count * static_cast<std::size_t>(width) % 8;
  if (used != 0 && static_cast<unsigned>(low[low_bytes(count, width) - 1]) >> used != 0)
    return false;
  std::size_t found = 0, last = 0, ones = 0;
  for (const std::uint64_t word : unary)
    ones += static_cast<std::size_t>(__builtin_popcountll(word));
  if (ones != count) return false;
  std::uint64_t lower = next;  // the sum of what is before the unary parts
  for (std::size_t word = 0; found < count; ++word) {
    for (std::uint64_t left = unary[word]; left != 0; left &= left - 1, ++found) {
      last = 64 * word + static_cast<std::size_t>(__builtin_ctzll(left));
      std::uint64_t bits;
      const std::size_t at = found * static_cast<std::size_t>(width);
      std::memcpy(&bits, low + at / 8, 8);
      lower += (bits >> at % 8 & mask) + (found != 0);
      const std::uint64_t index = lower + ((last - found) << width);
      if (index >= size) return false;
      indices[found] = static_cast<std::uint32_t>(index);
      next = index + 1;
    }
  }
  return last / 8 + 1 == unary_bytes;
}

// Packed indices: a byte for the format, all blocks' headers, then their bodies.
//
// Offsets of 16 bits in segments of 65,536 places would never be shorter. Gaps of width 14 take 15
// bits an index, 2 bytes a block and a bit for each 16,384 places. Offsets take 16 bits an index
// and 4 bytes for each 65,536 places.

constexpr std::byte kGaps{1};

bool ascends(const std::uint32_t* indices, std::size_t count, std::uint64_t size) {
  if (count == 0) return true;
  bool good = true;
  for (std::size_t i = 1; i < count; ++i) good &= indices[i - 1] < indices[i];
  return good && indices[count - 1] < size;
}

std::size_t pack_indices(const std::uint32_t* indices, std::size_t count, std::byte* out) {
  const std::size_t blocks = (count + kBlock - 1) / kBlock;
  *out = kGaps;
  std::size_t bytes = 1 + kHeaderBytes * blocks;
  std::uint32_t next = 0;
  for (std::size_t b = 0; b < blocks; ++b, indices += kBlock) {
    const std::size_t here = std::min(kBlock, count - b * kBlock);
    std::uint32_t gaps[kBlock];
    gaps[0] = indices[0] - next;
    for (std::size_t i = 1; i < here; ++i) gaps[i] = indices[i] - indices[i - 1] - 1;
    next = indices[here - 1] + 1;
    std::byte body[kBodyRoom];
    const std::size_t body_bytes = encode_gaps(gaps, here, out + 1 + kHeaderBytes * b, body);
    std::memcpy(out + bytes, body, body_bytes);
    bytes += body_bytes;
  }
  return bytes;
}

bool unpack_indices(const std::byte* payload, std::size_t bytes, std::uint64_t size,
                    std::uint32_t* indices, std::size_t count) {
  const std::size_t blocks = (count + kBlock - 1) / kBlock;
  if (bytes == 0 || *payload != kGaps || (bytes - 1) / kHeaderBytes < blocks) return false;
  const std::byte* body = payload + 1 + kHeaderBytes * blocks;
  std::size_t left = bytes - 1 - kHeaderBytes * blocks;
  std::uint64_t next = 0;
  for (std::size_t b = 0; b < blocks; ++b, indices += kBlock) {
    const std::size_t here = std::min(kBlock, count - b * kBlock);
    const std::byte* const header = payload + 1 + kHeaderBytes * b;
    const int width = static_cast<int>(header[0]);
    const auto unary_bytes = static_cast<std::size_t>(header[1]);
    if (width > kWidest || unary_bytes > kMostUnary) return false;
    const std::size_t body_bytes = unary_bytes + low_bytes(here, width);
    if (body_bytes > left) return false;
    std::byte near_the_end[kBodyRoom] = {};
    const bool roomy = left >= body_bytes + kSpare;
    if (!roomy) std::memcpy(near_the_end, body, body_bytes);
    if (!decode_gaps(roomy ? body : near_the_end, unary_bytes, width, here, size, next, indices))
      return false;
    body += body_bytes;
    left -= body_bytes;
  }
  return left == 0;
}
