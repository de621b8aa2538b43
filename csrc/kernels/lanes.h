// How each element type gets into and out of vectors.
//
// Included by one file for each instruction set, inside that file's own namespace, so that nothing
// compiled for one can be merged by the linker into code that another CPU runs.
//
// Work goes in steps of two vectors, a Pair. A codec names a stored type: load() widens a step to
// the accumulator, store() applies the NaN rule and rounds once. What is left at the end of an
// array goes the same way, through Padded buffers.

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

// fp32 and fp64.
template <class T, auto kNan>
struct Float : Plain<T> {
  static void store(T* to, Step<T> value) {
    using Bits = BitsOf<Full<T>>;
    Plain<T>::store(to, {canonical<Bits>(value.first, kNan), canonical<Bits>(value.second, kNan)});
  }
};
using Float32 = Float<float, kNanFloat32>;
using Float64 = Float<double, kNanFloat64>;

// 16-bit types. A step takes two neighbours as one word, and widens the lower halves into one
// vector and the upper halves into the other, which needs no shuffle. Nodes then hold the elements
// in that order, all of them alike, and the last store puts them back.
using Words = Full<std::uint32_t>;

struct BFloat16 {
  using Stored = std::uint16_t;
  using Accumulator = float;
  static constexpr bool kInterleaved = true;
  static Step<float> load(const std::uint16_t* from) {
    const auto words = load_vector<Words>(from);
    return {(Full<float>)(words << 16), (Full<float>)(words & 0xFFFF0000)};
  }
  static void store(std::uint16_t* to, Step<float> value) {
    const Words lower = round_to_bfloat16<Words>(value.first) >> 16;
    const Words upper = round_to_bfloat16<Words>(value.second) & 0xFFFF0000;
    store_vector(to, lower | upper);
  }
};

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
  static void narrow(std::uint16_t* to, Full<float> value) {
    store_vector(to, _mm512_maskz_cvtps_ph(0xFFFF, value, _MM_FROUND_TO_NEAREST_INT));
  }
#else
  static Full<float> widen(const std::uint16_t* from) {
    return _mm256_cvtph_ps(load_vector<__m128i>(from));
  }
  static void narrow(std::uint16_t* to, Full<float> value) {
    store_vector(to, _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
  }
#endif
};

#else

struct Float16 {
  using Stored = std::uint16_t;
  using Accumulator = float;
  static constexpr bool kInterleaved = true;
  static Step<float> load(const std::uint16_t* from) {
    const auto words = load_vector<Words>(from);
    return {float_from_float16<Full<float>>(words & 0xFFFF),
            float_from_float16<Full<float>>(words >> 16)};
  }
  static void store(std::uint16_t* to, Step<float> value) {
    store_vector(
        to, float16_from_float<Words>(value.first) | float16_from_float<Words>(value.second) << 16);
  }
};

#endif

// The last part of a step as a whole one, the rest zeros.
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
