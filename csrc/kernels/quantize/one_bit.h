// One bit an element: its sign, and the chunk's mean magnitude.

inline float fold(const Group& sums) {
  float lanes[kGroup];
  store_group<Number>(lanes, sums);
  for (int half = kGroup / 2; half > 0; half /= 2)
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  return lanes[0];
}

// Bit i: element i is below zero.
inline std::uint32_t negative(const Group& c) {
  std::uint32_t bits = 0;
#pragma GCC unroll 8
  for (int k = 0; k < kVectors; ++k) {
#if defined(__AVX512F__)
    const std::uint32_t below = _mm512_cmp_ps_mask(c.v[k], Floats{}, _CMP_LT_OQ);
#elif defined(__AVX2__)
    const auto below =
        static_cast<std::uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(c.v[k], Floats{}, _CMP_LT_OQ)));
#else
    std::uint32_t below = 0;
    for (int lane = 0; lane < kWidth; ++lane)
      below |= static_cast<std::uint32_t>(c.v[k][lane] < 0) << lane;
#endif
    bits |= below << k * kWidth;
  }
  return bits;
}

struct OneBit {
  static constexpr QuantizeCodec kCodec = QuantizeCodec::kOneBit;

  // One chunk of m elements.
  template <class In>
  static bool encode(const In& in, std::size_t m, std::byte* record, Stream& left) {
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
    const float sum = fold(sums);
    if (!(sum <= FLT_MAX)) return false;  // of magnitudes: one that is not finite stays so
    const float scale = sum / static_cast<float>(m);
    std::memcpy(record, &scale, sizeof(scale));
    const auto error = [&](const Group& c, std::size_t) {
      const Floats plus = Floats{} + scale, minus = -plus;
      return group_of([&](int k) { return c.v[k] - (c.v[k] < 0 ? minus : plus); });
    };
    put_errors(in, m, left, error);
    return true;
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
      return group_of([&](int k) { return decoded(bits >> k * kWidth); });
    }

   private:
    Floats decoded(std::uint32_t bits) const {
      const Words plus = (Words)(Floats{} + scale);
      constexpr std::uint32_t kSign = 0x80000000;
#if defined(__AVX512F__)
      return (Floats)_mm512_mask_xor_epi32((__m512i)plus, static_cast<__mmask16>(bits),
                                           (__m512i)plus, (__m512i)(Words{} + kSign));
#else
      Words own;
      for (int lane = 0; lane < kWidth; ++lane) own[lane] = 1U << lane;
      return (Floats)(plus ^ ((Words)(((Words{} + bits) & own) == own) & kSign));
#endif
    }
  };
};
