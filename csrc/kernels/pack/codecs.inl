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
