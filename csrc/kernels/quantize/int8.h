// Eight bits an element: how many times the chunk's scale it is, -127 to 127.

// 127 times the next fp32 is not finite.
constexpr float kMostInt8Scale = 0x1.020406p+121F;

// To a number below 2^22 in magnitude: then the lowest bits are the nearest integer's, ties to
// even.
constexpr float kToInteger = 0x1.8p23F;

// The lowest byte of each element.
inline void store_lowest_bytes(std::byte* to, const Group& group) {
#if defined(__AVX512F__)
  for (int k = 0; k < kVectors; ++k)
    store_vector(to + k * kWidth, _mm512_maskz_cvtepi32_epi8(0xFFFF, (__m512i)group.v[k]));
#elif defined(__AVX2__)
  const __m256i lowest = _mm256_set1_epi32(0xFF);
  const auto two = [&](int k) {
    return _mm256_packus_epi32(_mm256_and_si256((__m256i)group.v[k], lowest),
                               _mm256_and_si256((__m256i)group.v[k + 1], lowest));
  };
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  store_vector(to, _mm256_permutevar8x32_epi32(_mm256_packus_epi16(two(0), two(2)), order));
#else
  for (int k = 0; k < kVectors; ++k)
    for (int lane = 0; lane < kWidth; ++lane)
      to[k * kWidth + lane] = static_cast<std::byte>(((Words)group.v[k])[lane]);
#endif
}

struct Int8 {
  static constexpr QuantizeCodec kCodec = QuantizeCodec::kInt8;

  // One chunk of m elements.
  template <class In>
  static bool encode(const In& in, std::size_t m, std::byte* record, Stream& left) {
    const float most = largest(in, m);
    if (!(most <= FLT_MAX)) return false;
    float scale = most / 127, times = 127 / most;
    if (scale > kMostInt8Scale) scale = kMostInt8Scale;
    if (!(scale >= FLT_MIN && times <= FLT_MAX)) scale = times = 0;
    std::memcpy(record, &scale, sizeof(scale));
    std::byte* const data = record + sizeof(float);
    // No magnitude rounds to more than 127: times is at most 127 / most and an ulp.
    put_errors(in, m, left, [&](const Group& c, std::size_t i) {
      const Group shifted = group_of([&](int k) { return c.v[k] * times + kToInteger; });
      if (m - i >= kGroup) {
        store_lowest_bytes(data + i, shifted);
      } else {
        std::byte padded[kGroup];
        store_lowest_bytes(padded, shifted);
        std::memcpy(data + i, padded, m - i);
      }
      return group_of([&](int k) { return c.v[k] - (shifted.v[k] - kToInteger) * scale; });
    });
    return true;
  }

  // One chunk of a payload.
  struct Leaf {
    const std::byte* data;
    float scale;

    explicit Leaf(const std::byte* record) : data(record + sizeof(float)) {
      std::memcpy(&scale, record, sizeof(scale));
    }
    Group at(std::size_t i) const { return decoded(data + i); }
    Group part(std::size_t i, std::size_t count) const {
      std::byte padded[kGroup] = {};
      std::memcpy(padded, data + i, count);
      return decoded(padded);
    }

   private:
    Group decoded(const std::byte* from) const {
      const auto* bytes = reinterpret_cast<const std::int8_t*>(from);
      return group_of([&](int k) {
        const auto integers = widened<std::int32_t>(bytes + k * kWidth);
        return __builtin_convertvector(integers, Floats) * scale;
      });
    }
  };

 private:
  // The largest magnitude; not finite if any is not.
  template <class In>
  static float largest(const In& in, std::size_t m) {
    using Integers = Full<std::int32_t>;  // of magnitudes' bits, which ascend as they do
    Integers found[kVectors] = {};
    const auto look = [&](const Group& c) {
#pragma GCC unroll 8
      for (int k = 0; k < kVectors; ++k) {
        const auto bits = (Integers)magnitude(c.v[k]);
        found[k] = found[k] > bits ? found[k] : bits;
      }
    };
    each_group(
        m, [&](std::size_t i) { look(in.at(i)); },
        [&](std::size_t i, std::size_t rest) { look(in.part(i, rest)); });
    std::int32_t most = 0;
    for (int k = 0; k < kVectors; ++k)
      for (int lane = 0; lane < kWidth; ++lane)
        most = most < found[k][lane] ? found[k][lane] : most;
    return bits_as<float>(most);
  }
};
