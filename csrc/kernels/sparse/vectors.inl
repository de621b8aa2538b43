// Element types to fp32 and back, one number at a time; and keys. Included into the namespace of an
// instruction set (levels.h).

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
              "payloads are, and are copied as they lie");

struct Float32 {
  using Stored = float;
  static constexpr float kLargest = FLT_MAX;
  static float widen(float value) { return value; }
  static float narrow(float value) { return canonical<std::uint32_t>(value, kNanFloat32); }
};

struct BFloat16 {
  using Stored = std::uint16_t;
  static constexpr float kLargest = 0x1.FEp127F;
  static float widen(std::uint16_t bits) { return bits_as<float>(std::uint32_t{bits} << 16); }
  static std::uint16_t narrow(float value) {
    return static_cast<std::uint16_t>(round_to_bfloat16<std::uint32_t>(value) >> 16);
  }
};

struct Float16 {
  using Stored = std::uint16_t;
  static constexpr float kLargest = 65504.0F;
  static float widen(std::uint16_t bits) {
    return float_from<Dtype::kFloat16, float>(std::uint32_t{bits});
  }
  static std::uint16_t narrow(float value) {
    return static_cast<std::uint16_t>(rounded_to<Dtype::kFloat16, std::uint32_t>(value));
  }
};

// The nearest number that is finite. NaN stays.
template <class Type>
inline typename Type::Stored narrow_saturated(float value) {
  const float above = value > Type::kLargest ? Type::kLargest : value;
  return Type::narrow(above < -Type::kLargest ? -Type::kLargest : above);
}

// Calls function(Type{}) for the type of that name.
template <class Function>
inline auto with_type(Dtype dtype, Function function) {
  switch (dtype) {
    case Dtype::kFloat16:
      return function(Float16{});
    case Dtype::kBFloat16:
      return function(BFloat16{});
    default:
      return function(Float32{});
  }
}

constexpr std::uint32_t kMagnitude = 0x7FFFFFFF;
constexpr std::uint32_t kInfinity = 0x7F800000;  // the least key that is of no finite number

inline std::uint32_t key_of(float value) { return bits_as<std::uint32_t>(value) & kMagnitude; }

// Vectors of fp32 and of keys; which lanes, and those together.

constexpr std::size_t kLanes = kVectorBytes / 4;
typedef float Floats __attribute__((vector_size(kVectorBytes)));
// Keys have 31 bits: as signed numbers they are in the same order, and cheaper to compare.
typedef std::int32_t Keys __attribute__((vector_size(kVectorBytes)));
typedef std::uint32_t Words __attribute__((vector_size(kVectorBytes)));

template <class V>
inline V load(const void* from) {
  V vector;
  __builtin_memcpy(&vector, from, sizeof(vector));
  return vector;
}

template <class V>
inline void store(void* to, V vector) {
  __builtin_memcpy(to, &vector, sizeof(vector));
}

inline Keys keys_of(Floats values) {
  return reinterpret_cast<Keys>(values) & static_cast<std::int32_t>(kMagnitude);
}
inline Keys larger(Keys a, Keys b) { return a > b ? a : b; }

template <class Type>
inline Floats widen_lanes(const typename Type::Stored* from) {
  if constexpr (std::is_same_v<Type, Float32>) {
    return load<Floats>(from);
  } else {
#if defined(__AVX512F__)
    const auto bits = load<__m256i>(from);
    if constexpr (std::is_same_v<Type, Float16>)
      return _mm512_maskz_cvtph_ps(0xFFFF, bits);  // GCC 12 warns of the form without a mask
    else
      return reinterpret_cast<Floats>(
          reinterpret_cast<Words>(_mm512_maskz_cvtepu16_epi32(0xFFFF, bits)) << 16);
#elif defined(__AVX2__)
    const auto bits = load<__m128i>(from);
    if constexpr (std::is_same_v<Type, Float16>)
      return _mm256_cvtph_ps(bits);
    else
      return reinterpret_cast<Floats>(reinterpret_cast<Words>(_mm256_cvtepu16_epi32(bits)) << 16);
#else
    Floats wide;
    for (std::size_t i = 0; i < kLanes; ++i) wide[i] = Type::widen(from[i]);
    return wide;
#endif
  }
}

// Past the caches; `to` is aligned to a vector.
inline void store_past_caches(float* to, Floats values) {
#if defined(__AVX512F__)
  _mm512_stream_ps(to, values);
#elif defined(__AVX2__)
  _mm256_stream_ps(to, values);
#elif defined(__SSE2__)
  _mm_stream_ps(to, values);
#else
  store(to, values);
#endif
}

// Behind stores past the caches: they are seen before any later store.
inline void end_of_stores() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

// Bit i is lane i's.
using LaneMask = std::uint32_t;

inline LaneMask at_least(Keys keys, std::uint32_t least) {
#if defined(__AVX512F__)
  return _mm512_cmpge_epi32_mask(reinterpret_cast<__m512i>(keys),
                                 _mm512_set1_epi32(static_cast<int>(least)));
#else
  const Keys found = keys >= static_cast<std::int32_t>(least);
#if defined(__AVX2__)
  return static_cast<LaneMask>(_mm256_movemask_ps(reinterpret_cast<__m256>(found)));
#elif defined(__SSE2__)
  return static_cast<LaneMask>(_mm_movemask_ps(reinterpret_cast<__m128>(found)));
#else
  LaneMask mask = 0;
  for (std::size_t i = 0; i < kLanes; ++i) mask |= (found[i] & 1U) << i;
  return mask;
#endif
#endif
}

// How many lanes of which a bit is set.
inline std::size_t count(LaneMask mask) {
  return static_cast<std::size_t>(__builtin_popcount(mask));
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// For each eight bits: which lanes come together.
struct Together {
  std::uint8_t lanes[256][8];
};
constexpr Together together() {
  Together found{};
  for (int bits = 0; bits < 256; ++bits)
    for (int i = 0, set = 0; i < 8; ++i)
      if ((bits >> i & 1) != 0) found.lanes[bits][set++] = static_cast<std::uint8_t>(i);
  return found;
}
constexpr Together kTogether = together();
#endif

// The lanes of the mask come first, in their order; behind them is anything.
template <class V>
inline V compress(V vector, LaneMask mask) {
#if defined(__AVX512F__)
  return reinterpret_cast<V>(
      _mm512_maskz_compress_epi32(static_cast<__mmask16>(mask), reinterpret_cast<__m512i>(vector)));
#elif defined(__AVX2__)
  const __m256i lanes = _mm256_cvtepu8_epi32(
      _mm_loadl_epi64(reinterpret_cast<const __m128i*>(kTogether.lanes[mask])));
  return reinterpret_cast<V>(_mm256_permutevar8x32_epi32(reinterpret_cast<__m256i>(vector), lanes));
#else
  V found = vector;
  for (std::size_t n = 0; mask != 0; mask &= mask - 1)
    found[n++] = vector[static_cast<std::size_t>(__builtin_ctz(mask))];
  return found;
#endif
}

inline Words ascending_from(std::uint32_t first) {
  Words lanes;
  for (std::size_t i = 0; i < kLanes; ++i) lanes[i] = static_cast<std::uint32_t>(i);
  return lanes + first;
}
