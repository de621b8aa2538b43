// Exponent window: an element's exponent as its distance below the block's largest, in a few bit
// planes; sign and mantissa as they are. The highest code stands for an exponent that is not in the
// window and follows as a byte.
//
// Turned left by one bit, an element has its exponent on top and its sign at the end of the
// mantissa, so that the rest is whole bytes (and three bits of fp16's).

template <class T, int kExponent>
struct Window {
  static constexpr int kBits = 8 * sizeof(T);
  static constexpr int kRestBytes = (kBits - kExponent) / 8;
  static constexpr int kRestBits = (kBits - kExponent) % 8;
  static constexpr std::uint8_t kMode = 0x20;  // + the window's bit planes, 0 to kExponent - 1

  struct Plan {
    Bytes exponents;
    Header header;
    Extent extent;
    std::size_t bytes() const { return extent.rows + extent.tail; }
  };

  static bool is_mode(std::uint8_t mode) { return mode >= kMode && mode < kMode + kExponent; }

  static Extent extent(Header header) {
    const int planes = kRestBits + header.mode - kMode;
    return {static_cast<std::size_t>(kRestBytes * kBlock + planes * kPlaneBytes), header.escaped};
  }

  // The narrowest of the windows with the fewest bytes.
  static void plan(const Block<T>& block, Plan& plan) {
    for (int i = 0; i < kBlock; ++i)
      plan.exponents.v[i] = static_cast<std::uint8_t>(turned(block.v[i]) >> (kBits - kExponent));
    const std::uint8_t top = largest(plan.exponents);
    const Bytes distances = below(plan.exponents, top);
    int best = kExponent, fewest = kBlock * kExponent / 8, outside = 0;
    if (count(at_least(distances, 1)) == 0) best = fewest = 0;
    for (int planes = 1; planes < kExponent && planes * kPlaneBytes < fewest; ++planes) {
      const int escaped = count(at_least(distances, escape(planes)));
      if (planes * kPlaneBytes + escaped >= fewest) continue;
      best = planes;
      fewest = planes * kPlaneBytes + escaped;
      outside = escaped;
    }
    plan.header = {top, static_cast<std::uint8_t>(kMode + best), static_cast<std::uint8_t>(outside),
                   0};
    plan.extent = extent(plan.header);
  }

  static void encode(const Block<T>& block, const Plan& plan, std::byte* rows, std::byte* tail) {
    for (int byte = 0; byte < kRestBytes; ++byte, rows += kBlock)
      for (int i = 0; i < kBlock; ++i)
        rows[i] = static_cast<std::byte>(turned(block.v[i]) >> 8 * byte);
    if constexpr (kRestBits != 0) {
      Bytes bits;
      for (int i = 0; i < kBlock; ++i)
        bits.v[i] = static_cast<std::uint8_t>(turned(block.v[i]) >> 8 * kRestBytes);
      for (int bit = 0; bit < kRestBits; ++bit, rows += kPlaneBytes)
        store_plane(rows, with_bit(bits, bit));
    }
    const int planes = plan.header.mode - kMode;
    Bytes codes = below(plan.exponents, plan.header.base);
    const std::uint8_t out = escape(planes);
    for (int i = 0; i < kBlock; ++i) codes.v[i] = codes.v[i] < out ? codes.v[i] : out;
    for (int bit = 0; bit < planes; ++bit, rows += kPlaneBytes)
      store_plane(rows, with_bit(codes, bit));
    if (plan.header.escaped != 0)
      for_each(at_least(codes, out),
               [&](int i) { *tail++ = static_cast<std::byte>(plan.exponents.v[i]); });
  }

  static bool decode(Header header, const std::byte* rows, const std::byte* tail, std::byte* out) {
    const int planes = header.mode - kMode;
    const std::byte* plane = rows + kRestBytes * kBlock;
    Bytes high{};  // the exponent, with the rest's upper bits below it
    for (int bit = 0; bit < kRestBits; ++bit, plane += kPlaneBytes)
      set_bit(high, load_plane(plane), bit);
    Bytes codes{};
    for (int bit = 0; bit < planes; ++bit, plane += kPlaneBytes)
      set_bit(codes, load_plane(plane), bit);
    const Mask escaped = planes == 0 ? Mask{} : at_least(codes, escape(planes));
    if (count(escaped) != header.escaped) return false;
    const Bytes exponents = below(codes, header.base);
    Block<T> block;
    for (int i = 0; i < kBlock; ++i) {
      T turned = static_cast<T>((exponents.v[i] << kRestBits | high.v[i]) << 8 * kRestBytes);
      for (int byte = 0; byte < kRestBytes; ++byte)
        turned = static_cast<T>(turned | static_cast<T>(rows[byte * kBlock + i]) << 8 * byte);
      block.v[i] = static_cast<T>(turned >> 1 | turned << (kBits - 1));
    }
    copy_vectors<sizeof(block)>(out, &block);
    int highest = header.base;
    for_each(escaped, [&](int i) {
      const auto exponent = static_cast<std::uint8_t>(*tail++);
      highest = highest < exponent ? exponent : highest;
      constexpr int kLowest = kBits - 1 - kExponent;  // the exponent's lowest bit
      constexpr T kRest = static_cast<T>(~(((T{1} << kExponent) - 1) << kLowest));
      put_element(out, i, static_cast<T>((block.v[i] & kRest) | T{exponent} << kLowest));
    });
    return highest >> kExponent == 0;
  }

 private:
  static T turned(T bits) { return static_cast<T>(bits << 1 | bits >> (kBits - 1)); }
  // The code of an exponent outside of the window.
  static std::uint8_t escape(int planes) { return static_cast<std::uint8_t>((1 << planes) - 1); }
};
