// Packed indices: a byte for the format, all blocks' headers, then their bodies.
//
// Offsets of 16 bits in segments of 65,536 places would never be shorter. Gaps of width 14 take 15
// bits an index, 2 bytes a block and a bit for each 16,384 places. Offsets take 16 bits an index
// and 4 bytes for each 65,536 places.

constexpr std::byte kGaps{1};

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
