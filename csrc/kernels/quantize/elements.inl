// Groups: 32 elements at a time, in their own order. The rest at the end of an array is padded with
// zeros. Included after lanes.inl, into the namespace of an instruction set (levels.h).

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
              "payloads are, and are copied as they lie");

using Floats = Full<float>;
constexpr int kWidth = kLanes<float>;
constexpr int kGroup = 32;
constexpr int kVectors = kGroup / kWidth;

struct Group {
  Floats v[kVectors];
};

// Group(step(0), step(1), ...), for each vector's number.
template <class Make>
inline Group group_of(const Make& make) {
  Group group;
#pragma GCC unroll 8
  for (int k = 0; k < kVectors; ++k) group.v[k] = make(k);
  return group;
}

inline Group operator+(const Group& a, const Group& b) {
  return group_of([&](int k) { return a.v[k] + b.v[k]; });
}
inline Group operator-(const Group& a, const Group& b) {
  return group_of([&](int k) { return a.v[k] - b.v[k]; });
}

inline Floats magnitude(Floats x) { return (Floats)((Words)x & 0x7FFFFFFF); }

// Widen as many narrow numbers as a vector has floats, and narrow them: compilers do that one by
// one.
#if defined(__AVX512F__)
// Masked forms: the others read an undefined register, of which GCC 12 warns.
inline Words widened(const std::uint16_t* from) {
  return (Words)_mm512_maskz_cvtepu16_epi32(0xFFFF, load_vector<__m256i>(from));
}
inline Floats floats_of(const std::int8_t* from) {
  return _mm512_maskz_cvtepi32_ps(0xFFFF,
                                  _mm512_maskz_cvtepi8_epi32(0xFFFF, load_vector<__m128i>(from)));
}
inline void store_narrowed(std::uint16_t* to, Words value) {
  store_vector(to, _mm512_maskz_cvtepi32_epi16(0xFFFF, (__m512i)value));
}
#elif defined(__AVX2__)
inline Words widened(const std::uint16_t* from) {
  return (Words)_mm256_cvtepu16_epi32(load_vector<__m128i>(from));
}
inline Floats floats_of(const std::int8_t* from) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(load_vector<long long>(from))));
}
inline void store_narrowed(std::uint16_t* to, Words value) {
  const auto wide = (__m256i)value;
  store_vector(to,
               _mm_packus_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1)));
}
#else
inline Words widened(const std::uint16_t* from) {
  return __builtin_convertvector((load_vector<Vector<std::uint16_t, kWidth> >(from)), Words);
}
inline Floats floats_of(const std::int8_t* from) {
  return __builtin_convertvector((load_vector<Vector<std::int8_t, kWidth> >(from)), Floats);
}
inline void store_narrowed(std::uint16_t* to, Words value) {
  store_vector(to, __builtin_convertvector(value, Vector<std::uint16_t, kWidth>));
}
#endif

// Folds all lanes of a group into one: lane i with lane i + 16, then with the lane 8 further, 4, 2
// and 1.
template <class Op>
inline float folded(const Group& group) {
  // No copy of the group: compilers copy it in smaller pieces than are then loaded, and such a load
  // waits until all older stores have left.
  Floats sixteen[kVectors / 2];
#pragma GCC unroll 8
  for (int k = 0; k < kVectors / 2; ++k) sixteen[k] = Op::of(group.v[k], group.v[k + kVectors / 2]);
#pragma GCC unroll 8
  for (int half = kVectors / 4; half > 0; half /= 2)
#pragma GCC unroll 8
    for (int k = 0; k < half; ++k) sixteen[k] = Op::of(sixteen[k], sixteen[k + half]);
  const Floats lanes = sixteen[0];
#if defined(__AVX2__)
#if defined(__AVX512F__)
  const __m256 eight = Op::of(_mm512_maskz_extractf32x8_ps(0xFF, lanes, 0),
                              _mm512_maskz_extractf32x8_ps(0xFF, lanes, 1));
#else
  const __m256 eight = lanes;
#endif
  const __m128 four = Op::of(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = Op::of(four, _mm_movehl_ps(four, four));
  return Op::of(two, _mm_movehdup_ps(two))[0];
#else
  const Floats two = Op::of(lanes, Floats{lanes[2], lanes[3]});
  return Op::of(two, Floats{two[1]})[0];
#endif
}

struct Added {
  template <class V>
  static V of(V a, V b) {
    return a + b;
  }
};

// For magnitudes: their bits are in the same order, and what is not finite is above all else.
struct Larger {
  template <class V>
  static V of(V a, V b) {
    using Bits = Vector<std::int32_t, sizeof(V) / sizeof(float)>;
    return (V)((Bits)a > (Bits)b ? (Bits)a : (Bits)b);
  }
};

// How each type gets into a vector of floats, and out of it with the NaN rule and one rounding.
struct Fp32 {
  using Stored = float;
  static Floats load(const float* from) { return load_vector<Floats>(from); }
  static void store(float* to, Floats value) {
    store_vector(to, canonical<Words>(value, kNanFloat32));
  }
};

struct Bf16 {
  using Stored = std::uint16_t;
  static Floats load(const std::uint16_t* from) { return (Floats)(widened(from) << 16); }
  static void store(std::uint16_t* to, Floats value) {
    store_narrowed(to, round_to_bfloat16<Words>(value) >> 16);
  }
};

struct Fp16 {
  using Stored = std::uint16_t;
#if defined(__F16C__)
  static Floats load(const std::uint16_t* from) { return Float16::widen(from); }
  static void store(std::uint16_t* to, Floats value) {
    Float16::narrow(to, canonical<Words>(value, kNanFloat32));
  }
#else
  static Floats load(const std::uint16_t* from) {
    return float_from<Dtype::kFloat16, Floats>(widened(from));
  }
  static void store(std::uint16_t* to, Floats value) {
    store_narrowed(to, rounded_to<Dtype::kFloat16, Words>(value));
  }
#endif
};

// fp32 that is known to be a number: kept as it is.
struct Number : Fp32 {
  static void store(float* to, Floats value) { store_vector(to, value); }
};

template <class Element>
inline Group load_group(const typename Element::Stored* from) {
  return group_of([&](int k) { return Element::load(from + k * kWidth); });
}

// The first `count` elements of a group. The others are not read, and are zeros.
template <class Element>
inline Group load_part(const typename Element::Stored* from, std::size_t count) {
  typename Element::Stored padded[kGroup] = {};
  std::memcpy(padded, from, count * sizeof(padded[0]));
  return load_group<Element>(padded);
}

template <class Element>
inline void store_group(typename Element::Stored* to, const Group& group) {
#pragma GCC unroll 8
  for (int k = 0; k < kVectors; ++k) Element::store(to + k * kWidth, group.v[k]);
}

template <class Element>
inline void store_part(typename Element::Stored* to, const Group& group, std::size_t count) {
  typename Element::Stored padded[kGroup];
  store_group<Element>(padded, group);
  std::memcpy(to, padded, count * sizeof(padded[0]));
}

// Calls whole(i) for each group of `count` elements, then part(i, rest) for the rest.
template <class Whole, class Part>
inline void each_group(std::size_t count, const Whole& whole, const Part& part) {
  std::size_t i = 0;
  for (; i + kGroup <= count; i += kGroup) whole(i);
  if (i < count) part(i, count - i);
}

// c = x + held. It is computed again wherever it is needed.
template <class Element, bool kHeld>
struct Input {
  const typename Element::Stored* x;
  const float* held;

  Input from(std::size_t i) const { return {x + i, kHeld ? held + i : nullptr}; }
  Group at(std::size_t i) const {
    const Group own = load_group<Element>(x + i);
    if constexpr (kHeld)
      return own + load_group<Number>(held + i);
    else
      return own;
  }
  Group part(std::size_t i, std::size_t count) const {
    const Group own = load_part<Element>(x + i, count);
    if constexpr (kHeld)
      return own + load_part<Number>(held + i, count);
    else
      return own;
  }
  // Prefetches the lines of a later group, which may lie behind the array's end.
  void prefetch(std::size_t i) const {
    prefetch_lines(x, i);
    if constexpr (kHeld) prefetch_lines(held, i);
  }

 private:
  template <class T>
  static void prefetch_lines(const T* array, std::size_t i) {
    constexpr std::size_t kLine = 64;
    const auto first = reinterpret_cast<std::uintptr_t>(array) + i * sizeof(T);
    for (std::size_t at = 0; at < kGroup * sizeof(T); at += kLine)
      __builtin_prefetch(reinterpret_cast<const void*>(first + at));
  }
};
