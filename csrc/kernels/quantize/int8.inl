// Eight bits an element: a multiple of the chunk's scale, -127 to 127 times.

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
  std::uint32_t elements[kGroup];
  std::memcpy(elements, &group, sizeof(elements));
  for (int i = 0; i < kGroup; ++i) to[i] = static_cast<std::byte>(elements[i]);
#endif
}

struct Int8 {
  static constexpr const char* kName = "int8";
  static constexpr std::size_t record_bytes(std::size_t elements) {
    return sizeof(float) + elements;
  }

  float scale;
  float times;  // 1 / scale, as near as may be

  // Writes the scale of one chunk of m elements. False if one is not finite.
  template <class In>
  static bool scan(const In& in, std::size_t m, std::byte* record, Int8& found) {
    Group magnitudes{};
    const auto look = [&](const Group& c) {
      magnitudes = group_of([&](int k) { return Larger::of(magnitudes.v[k], magnitude(c.v[k])); });
    };
    each_group(
        m, [&](std::size_t i) { look(in.at(i)); },
        [&](std::size_t i, std::size_t rest) { look(in.part(i, rest)); });
    const float most = folded<Larger>(magnitudes);
    float scale = most / 127, times = 127 / most;
    if (scale > kMostInt8Scale) scale = kMostInt8Scale;
    if (!(scale >= FLT_MIN)) scale = times = 0;
    std::memcpy(record, &scale, sizeof(scale));
    found = {scale, times};
    return most <= FLT_MAX;
  }

  // Writes the data of group i, of `count` elements. Returns what is left of it. No magnitude
  // rounds to more than 127, because `times` is 127 / most to half an ulp.
  Group error(const Group& c, std::byte* record, std::size_t i, std::size_t count) const {
    const Group shifted = group_of([&](int k) { return c.v[k] * times + kToInteger; });
    std::byte* const data = record + sizeof(float) + i;
    if (count == kGroup) {
      store_lowest_bytes(data, shifted);
    } else {
      std::byte padded[kGroup];
      store_lowest_bytes(padded, shifted);
      std::memcpy(data, padded, count);
    }
    return group_of([&](int k) { return c.v[k] - (shifted.v[k] - kToInteger) * scale; });
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
      return group_of([&](int k) { return floats_of(bytes + k * kWidth) * scale; });
    }
  };
};
