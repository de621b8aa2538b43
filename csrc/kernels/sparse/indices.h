// Packed indices: blocks of gaps, or 16-bit offsets in segments of 65,536 places, the shorter one.

enum : unsigned char { kGaps = 1, kOffsets = 2 };
constexpr std::size_t kSegment = 65536;

bool all_below(const std::uint32_t* indices, std::size_t count, std::uint64_t size) {
  std::uint32_t largest = 0;
  for (std::size_t i = 0; i < count; ++i) largest = largest < indices[i] ? indices[i] : largest;
  return count == 0 || largest < size;
}

bool ascends(const std::uint32_t* indices, std::size_t count, std::uint64_t size) {
  if (count == 0) return true;
  bool good = true;
  for (std::size_t i = 1; i < count; ++i) good &= indices[i - 1] < indices[i];
  return good && indices[count - 1] < size;
}

std::uint64_t offsets_bytes(std::size_t count, std::uint64_t size) {
  return 1 + (size + kSegment - 1) / kSegment * 4 + std::uint64_t{count} * 2;
}

std::size_t pack_offsets(const std::uint32_t* indices, std::size_t count, std::uint64_t size,
                         std::byte* out) {
  *out++ = std::byte{kOffsets};
  const std::uint64_t segments = (size + kSegment - 1) / kSegment;
  std::byte* offsets = out + 4 * segments;
  std::size_t at = 0;
  for (std::uint64_t segment = 0; segment < segments; ++segment, out += 4) {
    const std::size_t first = at;
    for (; at < count && indices[at] / kSegment == segment; ++at, offsets += 2) {
      const auto offset = static_cast<std::uint16_t>(indices[at]);
      std::memcpy(offsets, &offset, 2);
    }
    const auto here = static_cast<std::uint32_t>(at - first);
    std::memcpy(out, &here, 4);
  }
  return static_cast<std::size_t>(offsets_bytes(count, size));
}

std::size_t pack_indices(const std::uint32_t* indices, std::size_t count, std::uint64_t size,
                         std::byte* out) {
  const std::size_t blocks = (count + kBlock - 1) / kBlock;
  const std::uint64_t most = offsets_bytes(count, size);
  std::uint64_t bytes = 1 + kHeaderBytes * blocks;
  if (bytes > most) return pack_offsets(indices, count, size, out);
  *out = std::byte{kGaps};
  std::uint32_t next = 0;
  for (std::size_t b = 0; b < blocks; ++b, indices += kBlock) {
    const std::size_t here = std::min(kBlock, count - b * kBlock);
    std::uint32_t gaps[kBlock];
    gaps[0] = indices[0] - next;
    for (std::size_t i = 1; i < here; ++i) gaps[i] = indices[i] - indices[i - 1] - 1;
    next = indices[here - 1] + 1;
    std::byte body[kBodyRoom];
    const std::size_t body_bytes = encode_gaps(gaps, here, out + 1 + kHeaderBytes * b, body);
    if (bytes + body_bytes > most) return pack_offsets(indices - b * kBlock, count, size, out);
    std::memcpy(out + bytes, body, body_bytes);
    bytes += body_bytes;
  }
  return static_cast<std::size_t>(bytes);
}

bool unpack_offsets(const std::byte* payload, std::size_t bytes, std::uint64_t size,
                    std::uint32_t* indices, std::size_t count) {
  if (bytes != offsets_bytes(count, size)) return false;
  const std::uint64_t segments = (size + kSegment - 1) / kSegment;
  const std::byte* counts = payload + 1;
  const std::byte* offsets = counts + 4 * segments;
  std::size_t left = count;
  for (std::uint64_t segment = 0; segment < segments; ++segment, counts += 4) {
    std::uint32_t here;
    std::memcpy(&here, counts, 4);
    if (here > left) return false;
    left -= here;
    std::uint32_t least = 0;
    bool good = true;
    for (std::uint32_t i = 0; i < here; ++i, offsets += 2) {
      std::uint16_t offset;
      std::memcpy(&offset, offsets, 2);
      good &= offset >= least;
      least = offset + 1U;
      *indices++ = static_cast<std::uint32_t>(segment * kSegment + offset);
    }
    if (!good || segment * kSegment + least > size) return false;
  }
  return left == 0;
}

bool unpack_gaps(const std::byte* payload, std::size_t bytes, std::uint64_t size,
                 std::uint32_t* indices, std::size_t count) {
  const std::size_t blocks = (count + kBlock - 1) / kBlock;
  if ((bytes - 1) / kHeaderBytes < blocks) return false;
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

bool unpack_indices(const std::byte* payload, std::size_t bytes, std::uint64_t size,
                    std::uint32_t* indices, std::size_t count) {
  if (bytes == 0) return false;
  if (*payload == std::byte{kGaps}) return unpack_gaps(payload, bytes, size, indices, count);
  return *payload == std::byte{kOffsets} && unpack_offsets(payload, bytes, size, indices, count);
}
