// How each element type gets into and out of vectors.
//
// Included into the namespace of an instruction set (levels.h).
//
// Work goes in steps of two vectors, a Pair. A codec names a stored type: load() widens a step to
// the accumulator, store() applies the NaN rule and rounds once. The rest at the end of an array is
// a step, too, in a Padded buffer.

template <class T, int W>
struct VectorOf {
  typedef T type __attribute__((vector_size(W * sizeof(T))));
};
template <class T, int W>
using Vector = typename VectorOf<T, W>::type;

template <class V>
struct Pair {
  V first, second;
};

// Lanes of a vector, and elements of a step, by the type that they are computed in.
template <class A>
constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(A));
template <class A>
constexpr int kStep = 2 * kLanes<A>;
template <class A>
using Full = Vector<A, kLanes<A>>;
template <class A>
using Step = Pair<Full<A>>;

// The unsigned integers of a vector's shape.
template <class V>
using BitsOf = std::conditional_t<sizeof(V{}[0]) == 4, Full<std::uint32_t>, Full<std::uint64_t>>;

template <class V, class T>
inline V load_vector(const T* from) {
  V value;
  __builtin_memcpy(&value, from, sizeof(value));
  return value;
}

template <class V, class T>
inline void store_vector(T* to, V value) {
  __builtin_memcpy(to, &value, sizeof(value));
}

// A number that is computed in its own type, and stored as it is.
template <class T>
struct Plain {
  using Stored = T;
  using Accumulator = T;
  static Step<T> load(const T* from) {
    return {load_vector<Full<T>>(from), load_vector<Full<T>>(from + kLanes<T>)};
  }
  static void store(T* to, Step<T> value) {
    store_vector(to, value.first);
    store_vector(to + kLanes<T>, value.second);
  }
};

// How each type gets into and out of its accumulator.
template <Dtype kType, class = void>
struct CodecOf;

// fp32 and fp64.
template <class T, auto kNan>
struct Float : Plain<T> {
  static void store(T* to, Step<T> value) {
    using Bits = BitsOf<Full<T>>;
    Plain<T>::store(to, {canonical<Bits>(value.first, kNan), canonical<Bits>(value.second, kNan)});
  }
};
template <>
struct CodecOf<Dtype::kFloat32> : Float<float, kNanFloat32> {};
template <>
struct CodecOf<Dtype::kFloat64> : Float<double, kNanFloat64> {};

// The integer type of so many bytes.
template <std::size_t kBytes, bool kSigned>
using Integer = std::conditional_t<
    kBytes == 1, std::conditional_t<kSigned, std::int8_t, std::uint8_t>,
    std::conditional_t<
        kBytes == 2, std::conditional_t<kSigned, std::int16_t, std::uint16_t>,
        std::conditional_t<kBytes == 4, std::conditional_t<kSigned, std::int32_t, std::uint32_t>,
                           std::conditional_t<kSigned, std::int64_t, std::uint64_t>>>>;
template <Dtype kType>
using IntegerOf = Integer<traits_of(kType).size, traits_of(kType).dlpack == DlpackCode::kInt>;
template <Dtype kType>
struct CodecOf<kType, std::enable_if_t<traits_of(kType).numbers != Numbers::kFloat>>
    : Plain<IntegerOf<kType>> {};

// Narrow floats. A step takes two neighbours as one word. The lower halves become one vector, the
// upper halves the other: that needs no shuffle. All nodes hold the elements in that order, and the
// last store puts them back.
using Words = Full<std::uint32_t>;

template <Dtype kType>
struct NarrowCodec {
  using Stored = Integer<traits_of(kType).size, false>;
  using Accumulator = float;
  static constexpr bool kInterleaved = true;
  static constexpr int kBits = 8 * sizeof(Stored);
  using Neighbours = Vector<Integer<2 * sizeof(Stored), false>, kLanes<float>>;

  static Step<float> load(const Stored* from) {
    const Words words = __builtin_convertvector(load_vector<Neighbours>(from), Words);
    return {float_from<kType, Full<float>>(words), float_from<kType, Full<float>>(words >> kBits)};
  }
  static void store(Stored* to, Step<float> value) {
    const Words words =
        rounded_to<kType, Words>(value.first) | rounded_to<kType, Words>(value.second) << kBits;
    store_vector(to, __builtin_convertvector(words, Neighbours));
  }
};
template <Dtype kType>
struct CodecOf<kType, std::enable_if_t<traits_of(kType).numbers == Numbers::kFloat &&
                                       traits_of(kType).size == 2>> : NarrowCodec<kType> {};

#if defined(__F16C__)

// By instruction: these keep subnormals whatever MXCSR says, and round as their operand says.
struct Float16 {
  using Stored = std::uint16_t;
  using Accumulator = float;
  static Step<float> load(const std::uint16_t* from) {
    return {widen(from), widen(from + kLanes<float>)};
  }
  static void store(std::uint16_t* to, Step<float> value) {
    narrow(to, canonical<Words>(value.first, kNanFloat32));
    narrow(to + kLanes<float>, canonical<Words>(value.second, kNanFloat32));
  }

  // A vector of elements in their own order.
#if defined(__AVX512F__)
  // Masked forms: the others read an undefined register, of which GCC 12 warns.
  static Full<float> widen(const std::uint16_t* from) {
    return _mm512_maskz_cvtph_ps(0xFFFF, load_vector<__m256i>(from));
  }
  template <class Halves>
  static Full<float> widen_bits(Halves bits) {
    return _mm512_maskz_cvtph_ps(0xFFFF, (__m256i)bits);
  }
  static void narrow(std::uint16_t* to, Full<float> value) {
    store_vector(to, _mm512_maskz_cvtps_ph(0xFFFF, value, _MM_FROUND_TO_NEAREST_INT));
  }
#else
  static Full<float> widen(const std::uint16_t* from) {
    return _mm256_cvtph_ps(load_vector<__m128i>(from));
  }
  template <class Halves>
  static Full<float> widen_bits(Halves bits) {
    return _mm256_cvtph_ps((__m128i)bits);
  }
  static void narrow(std::uint16_t* to, Full<float> value) {
    store_vector(to, _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
  }
#endif
};
template <>
struct CodecOf<Dtype::kFloat16> : Float16 {};

// Floats of a byte are widened to fp16 first, which holds them all, and from there to fp32. They
// are rounded from fp32 in one step.
template <Dtype kType>
struct ByteCodec {
  using Stored = std::uint8_t;
  using Accumulator = float;
  using Bytes = Vector<std::int8_t, kLanes<float>>;
  using Halves = Vector<std::int16_t, kLanes<float>>;

  static Step<float> load(const std::uint8_t* from) {
    return {widen(from), widen(from + kLanes<float>)};
  }
  static Full<float> widen(const std::uint8_t* from) {
    using Narrow = NarrowFloat<kType>;
    constexpr int kShift = 10 - Narrow::kMantissa;
    static_assert(kShift == 8 || (kShift == 7 && !Narrow::kHasInfinity));
    // As signed numbers: the sign comes to its place by itself.
    const Halves bits = __builtin_convertvector(load_vector<Bytes>(from), Halves);
    if constexpr (kShift == 8) {
      return Float16::widen_bits(bits << kShift);
    } else {
      const Halves number = bits << kShift & static_cast<std::int16_t>(0xBFFF);
      // The NaN alone carries into the exponent's highest bit, which makes it fp16's.
      constexpr std::int16_t kCarry = 1 << kShift;
      const Halves nan = (number + kCarry) & 0x4000;
      return Float16::widen_bits(number | nan) * power_of_two(15 - Narrow::kBias);
    }
  }
  static void store(std::uint8_t* to, Step<float> value) {
    const Words first = rounded_to<kType, Words>(value.first);
    const Words second = rounded_to<kType, Words>(value.second);
#if defined(__AVX512F__)
    store_vector(to, _mm512_maskz_cvtepi32_epi8(0xFFFF, (__m512i)first));
    store_vector(to + kLanes<float>, _mm512_maskz_cvtepi32_epi8(0xFFFF, (__m512i)second));
#else
    // Both lanes' halves of each, then the four quarters in their order.
    const __m256i words = _mm256_packus_epi32((__m256i)first, (__m256i)second);
    const __m256i ordered = _mm256_permute4x64_epi64(words, 0xD8);
    store_vector(to, _mm_packus_epi16(_mm256_castsi256_si128(ordered),
                                      _mm256_extracti128_si256(ordered, 1)));
#endif
  }
};
template <Dtype kType>
struct CodecOf<kType, std::enable_if_t<traits_of(kType).numbers == Numbers::kFloat &&
                                       traits_of(kType).size == 1>> : ByteCodec<kType> {};

#else

template <Dtype kType>
struct CodecOf<kType, std::enable_if_t<traits_of(kType).numbers == Numbers::kFloat &&
                                       traits_of(kType).size == 1>> : NarrowCodec<kType> {};

#endif

// A part of a step, padded with zeros.
template <class Codec>
struct Padded {
  static constexpr std::size_t kElements = kStep<typename Codec::Accumulator>;
  using T = typename Codec::Stored;
  T elements[kElements];
  void read(const T* from, std::size_t count) {
    *this = {};
    __builtin_memcpy(elements, from, count * sizeof(T));
  }
  void write(T* to, std::size_t count) const { __builtin_memcpy(to, elements, count * sizeof(T)); }
};
