// One bit an element: its sign, and the chunk's mean magnitude.

// Bit i: element i is below zero.
inline std::uint32_t negative(const Group& c) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask(c.v[0], Floats{}, _CMP_LT_OQ) |
         static_cast<std::uint32_t>(_mm512_cmp_ps_mask(c.v[1], Floats{}, _CMP_LT_OQ)) << 16;
#elif defined(__AVX2__)
  // A byte for each, in an order that the last step mends.
  const auto below = [&](int k) { return (__m256i)(c.v[k] < 0); };
  const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(below(0), below(1)),
                                           _mm256_packs_epi32(below(2), below(3)));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  return static_cast<std::uint32_t>(
      _mm256_movemask_epi8(_mm256_permutevar8x32_epi32(bytes, order)));
#else
  float elements[kGroup];
  store_group<Number>(elements, c);
  std::uint32_t bits = 0;
  for (int i = 0; i < kGroup; ++i) bits |= static_cast<std::uint32_t>(elements[i] < 0) << i;
  return bits;
#endif
}

struct OneBit {
  static constexpr const char* kName = "one_bit";
  static constexpr std::size_t record_bytes(std::size_t elements) {
    return sizeof(float) + (elements + 7) / 8;
  }

  float scale;

  // Writes the record of one chunk of m elements. False if one is not finite, or their sum.
  template <class In>
  static bool scan(const In& in, std::size_t m, std::byte* record, OneBit& found) {
    std::byte* const data = record + sizeof(float);
    Group sums{};
    const auto add = [&](const Group& c, std::size_t i, std::size_t bytes) {
      sums = group_of([&](int k) { return sums.v[k] + magnitude(c.v[k]); });
      const std::uint32_t bits = negative(c);
      std::memcpy(data + i / 8, &bits, bytes);
    };
    each_group(
        m, [&](std::size_t i) { add(in.at(i), i, sizeof(std::uint32_t)); },
        [&](std::size_t i, std::size_t rest) { add(in.part(i, rest), i, (rest + 7) / 8); });
    const float sum = folded<Added>(sums);
    found.scale = sum / static_cast<float>(m);
    std::memcpy(record, &found.scale, sizeof(found.scale));
    return sum <= FLT_MAX;  // of magnitudes: one that is not finite stays so
  }

  // Returns what is left of group i, of `count` elements.
  Group error(const Group& c, std::byte*, std::size_t, std::size_t) const {
    const Floats plus = Floats{} + scale, minus = -plus;
    return group_of([&](int k) { return c.v[k] - (c.v[k] < 0 ? minus : plus); });
  }

  // One chunk of a payload.
  struct Leaf {
    const std::byte* data;
    float scale;

    explicit Leaf(const std::byte* record) : data(record + sizeof(float)) {
      std::memcpy(&scale, record, sizeof(scale));
    }
    Group at(std::size_t i) const { return part(i, kGroup); }
    Group part(std::size_t i, std::size_t count) const {
      std::uint32_t bits = 0;
      std::memcpy(&bits, data + i / 8, (count + 7) / 8);
      return group_of([&](int k) { return decoded(bits, k); });
    }

   private:
    // The group's vector number k.
    Floats decoded(std::uint32_t bits, int k) const {
      const Words plus = (Words)(Floats{} + scale);
      constexpr std::uint32_t kSign = 0x80000000;
#if defined(__AVX512F__)
      return (Floats)_mm512_mask_xor_epi32((__m512i)plus,
                                           static_cast<__mmask16>(bits >> k * kWidth),
                                           (__m512i)plus, (__m512i)(Words{} + kSign));
#else
      Words own;
      for (int lane = 0; lane < kWidth; ++lane) own[lane] = 1U << (k * kWidth + lane);
      return (Floats)(plus ^ ((Words)(((Words{} + bits) & own) == own) & kSign));
#endif
    }
  };
};
