// Vectors of W lanes, and how each element type gets into and out of them.
//
// Included by one file for each instruction set, inside that file's own namespace, so that nothing
// compiled for one can be merged by the linker into code that another CPU runs. W = 1 is the tail:
// the same operations on one element.
//
// A codec names a stored type: load() widens to the accumulator, store() applies the NaN rule and
// rounds once.

template <class T, int W>
struct VectorOf {
  typedef T type __attribute__((vector_size(W * sizeof(T))));
};
template <class T, int W>
using Vector = typename VectorOf<T, W>::type;

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

// A node of the order: an accumulator as it is.
template <class T>
struct Node {
  using Stored = T;
  using Accumulator = T;
  template <int W>
  static Vector<T, W> load(const T* from) {
    return load_vector<Vector<T, W>>(from);
  }
  template <int W>
  static void store(T* to, Vector<T, W> value) {
    store_vector(to, value);
  }
};

struct Float32 : Node<float> {
  template <int W>
  static void store(float* to, Vector<float, W> value) {
    using Bits = Vector<std::uint32_t, W>;
    store_vector(to, value == value ? (Bits)value : Bits{} + kNanFloat32);
  }
};

struct Float64 : Node<double> {
  template <int W>
  static void store(double* to, Vector<double, W> value) {
    using Bits = Vector<std::uint64_t, W>;
    store_vector(to, value == value ? (Bits)value : Bits{} + kNanFloat64);
  }
};

struct BFloat16 {
  using Stored = std::uint16_t;
  using Accumulator = float;
  template <int W>
  static Vector<float, W> load(const std::uint16_t* from) {
    const auto words = load_vector<Vector<std::uint16_t, W>>(from);
    return (Vector<float, W>)(__builtin_convertvector(words, Vector<std::uint32_t, W>) << 16);
  }
  template <int W>
  static void store(std::uint16_t* to, Vector<float, W> value) {
    using Bits = Vector<std::uint32_t, W>;
    const Bits bits = (Bits)value;
    const Bits rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    const Bits result = value == value ? rounded : Bits{} + kNanBFloat16;
    store_vector(to, __builtin_convertvector(result, Vector<std::uint16_t, W>));
  }
};

struct Float16 {
  using Stored = std::uint16_t;
  using Accumulator = float;
  template <int W>
  static Vector<float, W> load(const std::uint16_t* from) {
#if defined(__AVX512F__)
    if constexpr (W == 16)
      return (Vector<float, W>)_mm512_maskz_cvtph_ps(0xFFFF, load_vector<__m256i>(from));
#elif defined(__F16C__)
    if constexpr (W == 8) return (Vector<float, W>)_mm256_cvtph_ps(load_vector<__m128i>(from));
#endif
    Vector<float, W> value;
    for (int lane = 0; lane < W; ++lane) value[lane] = float_from_float16(from[lane]);
    return value;
  }
  template <int W>
  static void store(std::uint16_t* to, Vector<float, W> value) {
    // Masked forms: the others read an undefined register, of which GCC 12 warns.
    // The conversion instructions round to nearest even by their operand, and make subnormals
    // whatever MXCSR says; a canonical fp32 NaN becomes the canonical fp16 one.
#if defined(__AVX512F__) || defined(__F16C__)
    using Bits = Vector<std::uint32_t, W>;
    [[maybe_unused]] const auto quiet =
        (Vector<float, W>)(value == value ? (Bits)value : Bits{} + kNanFloat32);
#endif
#if defined(__AVX512F__)
    if constexpr (W == 16)
      return store_vector(to,
                          _mm512_maskz_cvtps_ph(0xFFFF, (__m512)quiet, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
    if constexpr (W == 8)
      return store_vector(to, _mm256_cvtps_ph((__m256)quiet, _MM_FROUND_TO_NEAREST_INT));
#endif
    for (int lane = 0; lane < W; ++lane) to[lane] = float16_from_float(value[lane]);
  }
};
