// A block of 128 elements, and 128 bytes or bits at a time, one for each of its elements.
//
// Included into the namespace of an instruction set (levels.h). Loops over a block are plain, and
// compilers vectorise them. Conversions between bytes and bits, which compilers do not see, are
// written with intrinsics.

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
              "payloads are, and are copied as they lie");

constexpr int kBlock = 128;

template <class T>
struct alignas(64) Block {
  T v[kBlock];
};
using Bytes = Block<std::uint8_t>;
using Words = Block<std::uint32_t>;

// Copies whole vectors. A compiler's own copy may store half vectors, and then a load of a whole
// one waits until all older stores have left.
template <int kBytes>
inline void copy_vectors(void* to, const void* from) {
  using Vector = std::uint8_t __attribute__((vector_size(kVectorBytes)));
  static_assert(kBytes % kVectorBytes == 0);
  for (int i = 0; i < kBytes; i += kVectorBytes) {
    Vector vector;
    __builtin_memcpy(&vector, static_cast<const std::byte*>(from) + i, kVectorBytes);
    __builtin_memcpy(static_cast<std::byte*>(to) + i, &vector, kVectorBytes);
  }
}

// Element i is bit i % 64 of v[i / 64].
struct Mask {
  std::uint64_t v[2];
};

inline int count(Mask mask) {
  return __builtin_popcountll(mask.v[0]) + __builtin_popcountll(mask.v[1]);
}

inline Mask operator|(Mask a, Mask b) { return {{a.v[0] | b.v[0], a.v[1] | b.v[1]}}; }
inline Mask operator&(Mask a, Mask b) { return {{a.v[0] & b.v[0], a.v[1] & b.v[1]}}; }
inline Mask operator~(Mask a) { return {{~a.v[0], ~a.v[1]}}; }

// Calls visit(element) for each, in ascending order.
template <class Visit>
inline void for_each(Mask mask, Visit visit) {
  for (int half = 0; half < 2; ++half)
    for (std::uint64_t left = mask.v[half]; left != 0; left &= left - 1)
      visit(64 * half + __builtin_ctzll(left));
}

// Bit planes: 16 bytes, element i is bit i % 8 of byte i / 8.
constexpr int kPlaneBytes = kBlock / 8;

inline void store_plane(std::byte* to, Mask mask) { __builtin_memcpy(to, mask.v, kPlaneBytes); }

inline Mask load_plane(const std::byte* from) {
  Mask mask;
  __builtin_memcpy(mask.v, from, kPlaneBytes);
  return mask;
}

#if defined(__AVX512BW__)

inline __m512i half_of(const Bytes& bytes, int half) {
  return _mm512_load_si512(bytes.v + 64 * half);
}

// Which are `limit` or more.
inline Mask at_least(const Bytes& bytes, std::uint8_t limit) {
  const __m512i least = _mm512_set1_epi8(static_cast<char>(limit));
  return {{_mm512_cmpge_epu8_mask(half_of(bytes, 0), least),
           _mm512_cmpge_epu8_mask(half_of(bytes, 1), least)}};
}

// Which have bit number `bit`.
inline Mask with_bit(const Bytes& bytes, int bit) {
  const __m512i one = _mm512_set1_epi8(static_cast<char>(1 << bit));
  return {{_mm512_test_epi8_mask(half_of(bytes, 0), one),
           _mm512_test_epi8_mask(half_of(bytes, 1), one)}};
}

// Sets bit number `bit`, clear so far, of those in the mask.
inline void set_bit(Bytes& bytes, Mask mask, int bit) {
  const __m512i one = _mm512_set1_epi8(static_cast<char>(1 << bit));
  for (int half = 0; half < 2; ++half) {
    const __m512i before = half_of(bytes, half);
    _mm512_store_si512(bytes.v + 64 * half,
                       _mm512_mask_add_epi8(before, mask.v[half], before, one));
  }
}

inline Mask equal_to(const Words& words, std::uint32_t value) {
  const __m512i wanted = _mm512_set1_epi32(static_cast<int>(value));
  Mask mask{};
  for (int i = 0; i < kBlock; i += 16) {
    const std::uint64_t found = _mm512_cmpeq_epi32_mask(_mm512_load_si512(words.v + i), wanted);
    mask.v[i / 64] |= found << i % 64;
  }
  return mask;
}

// The lowest bytes of those in the mask, in ascending order, into `to`, which has kGatherRoom
// bytes; how many.
constexpr int kGatherRoom = kBlock + 16;

inline int gather(const Words& words, Mask mask, std::uint8_t* to) {
  std::uint8_t* next = to;
  for (int i = 0; i < kBlock; i += 16) {
    const auto which = static_cast<__mmask16>(mask.v[i / 64] >> i % 64);
    const __m512i found = _mm512_maskz_compress_epi32(which, _mm512_load_si512(words.v + i));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(next), _mm512_maskz_cvtepi32_epi8(0xFFFF, found));
    next += __builtin_popcount(which);
  }
  return static_cast<int>(next - to);
}

// The inverse, with zeros for the others.
inline void scatter(const std::uint8_t* from, Mask mask, Words& words) {
  for (int i = 0; i < kBlock; i += 16) {
    const auto which = static_cast<__mmask16>(mask.v[i / 64] >> i % 64);
    const __m128i next = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    _mm512_store_si512(words.v + i,
                       _mm512_maskz_expand_epi32(which, _mm512_maskz_cvtepu8_epi32(0xFFFF, next)));
    from += __builtin_popcount(which);
  }
}

#elif defined(__AVX2__)

inline __m256i quarter_of(const Bytes& bytes, int quarter) {
  return _mm256_load_si256(reinterpret_cast<const __m256i*>(bytes.v + 32 * quarter));
}

// The mask of the bytes' highest bits, after `step` of each quarter.
template <class Step>
inline Mask mask_of(const Bytes& bytes, Step step) {
  std::uint32_t found[4];
  for (int quarter = 0; quarter < 4; ++quarter)
    found[quarter] =
        static_cast<std::uint32_t>(_mm256_movemask_epi8(step(quarter_of(bytes, quarter))));
  return {{found[0] | std::uint64_t{found[1]} << 32, found[2] | std::uint64_t{found[3]} << 32}};
}

inline Mask at_least(const Bytes& bytes, std::uint8_t limit) {
  const __m256i least = _mm256_set1_epi8(static_cast<char>(limit));
  return mask_of(bytes, [=](__m256i x) { return _mm256_cmpeq_epi8(_mm256_max_epu8(x, least), x); });
}

inline Mask with_bit(const Bytes& bytes, int bit) {
  const __m128i up =
      _mm_cvtsi32_si128(7 - bit);  // what crosses into a neighbour is not its highest
  return mask_of(bytes, [=](__m256i x) { return _mm256_sll_epi16(x, up); });
}

inline void set_bit(Bytes& bytes, Mask mask, int bit) {
  // Each byte gets the mask's byte that has its bit, then asks for that bit.
  const __m256i source = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1,  //
                                          2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
  const __m256i own = _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201));
  const __m256i one = _mm256_set1_epi8(static_cast<char>(1 << bit));
  for (int quarter = 0; quarter < 4; ++quarter) {
    const auto bits = static_cast<int>(mask.v[quarter / 2] >> 32 * (quarter % 2));
    const __m256i spread = _mm256_shuffle_epi8(_mm256_set1_epi32(bits), source);
    const __m256i set = _mm256_cmpeq_epi8(_mm256_and_si256(spread, own), own);
    _mm256_store_si256(reinterpret_cast<__m256i*>(bytes.v + 32 * quarter),
                       _mm256_or_si256(quarter_of(bytes, quarter), _mm256_and_si256(set, one)));
  }
}

inline Mask equal_to(const Words& words, std::uint32_t value) {
  const __m256i wanted = _mm256_set1_epi32(static_cast<int>(value));
  Mask mask{};
  for (int i = 0; i < kBlock; i += 8) {
    const __m256i x = _mm256_load_si256(reinterpret_cast<const __m256i*>(words.v + i));
    const int found = _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(x, wanted)));
    mask.v[i / 64] |= static_cast<std::uint64_t>(found) << i % 64;
  }
  return mask;
}

// For each eight bits: where the bytes whose bit is set go, or come from.
struct Shuffles {
  std::uint8_t together[256][8], apart[256][8];
};

constexpr Shuffles shuffles() {
  Shuffles found{};
  for (int bits = 0; bits < 256; ++bits) {
    int set = 0;
    for (int i = 0; i < 8; ++i) {
      const bool is_set = (bits >> i & 1) != 0;
      found.apart[bits][i] = static_cast<std::uint8_t>(is_set ? set : 0x80);  // 0x80: a zero
      if (is_set) found.together[bits][set++] = static_cast<std::uint8_t>(i);
    }
  }
  return found;
}
constexpr Shuffles kShuffles = shuffles();

inline __m128i eight_at(const void* from) {
  return _mm_loadl_epi64(static_cast<const __m128i*>(from));
}

constexpr int kGatherRoom = kBlock + 16;

inline int gather(const Words& words, Mask mask, std::uint8_t* to) {
  const __m256i lowest =
      _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,
                       0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1);
  std::uint8_t* next = to;
  for (int i = 0; i < kBlock; i += 8) {
    const auto which = static_cast<std::uint8_t>(mask.v[i / 64] >> i % 64);
    const __m256i bytes = _mm256_shuffle_epi8(
        _mm256_load_si256(reinterpret_cast<const __m256i*>(words.v + i)), lowest);
    const __m128i all =
        _mm_or_si128(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1));
    const __m128i found = _mm_shuffle_epi8(all, eight_at(kShuffles.together[which]));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(next), found);
    next += __builtin_popcount(which);
  }
  return static_cast<int>(next - to);
}

inline void scatter(const std::uint8_t* from, Mask mask, Words& words) {
  for (int i = 0; i < kBlock; i += 8) {
    const auto which = static_cast<std::uint8_t>(mask.v[i / 64] >> i % 64);
    const __m128i found = _mm_shuffle_epi8(eight_at(from), eight_at(kShuffles.apart[which]));
    _mm256_store_si256(reinterpret_cast<__m256i*>(words.v + i), _mm256_cvtepu8_epi32(found));
    from += __builtin_popcount(which);
  }
}

#else

template <class T, class Is>
inline Mask mask_of(const Block<T>& block, Is is) {
  Mask mask{};
  for (int i = 0; i < kBlock; ++i)
    mask.v[i / 64] |= static_cast<std::uint64_t>(is(block.v[i])) << i % 64;
  return mask;
}

inline Mask at_least(const Bytes& bytes, std::uint8_t limit) {
  return mask_of(bytes, [=](std::uint8_t x) { return x >= limit; });
}

inline Mask with_bit(const Bytes& bytes, int bit) {
  return mask_of(bytes, [=](std::uint8_t x) { return (x >> bit & 1) != 0; });
}

inline void set_bit(Bytes& bytes, Mask mask, int bit) {
  for (int i = 0; i < kBlock; ++i)
    bytes.v[i] = static_cast<std::uint8_t>(bytes.v[i] | (mask.v[i / 64] >> i % 64 & 1) << bit);
}

constexpr int kGatherRoom = kBlock + 16;

inline int gather(const Words& words, Mask mask, std::uint8_t* to) {
  int found = 0;
  for_each(mask, [&](int i) { to[found++] = static_cast<std::uint8_t>(words.v[i]); });
  return found;
}

inline void scatter(const std::uint8_t* from, Mask mask, Words& words) {
  words = {};
  for_each(mask, [&](int i) { words.v[i] = *from++; });
}

inline Mask equal_to(const Words& words, std::uint32_t value) {
  return mask_of(words, [=](std::uint32_t x) { return x == value; });
}

#endif

inline std::uint8_t largest(const Bytes& bytes) {
  std::uint8_t found = 0;
  for (int i = 0; i < kBlock; ++i) found = found < bytes.v[i] ? bytes.v[i] : found;
  return found;
}

// Each byte's distance below `top`, modulo 256.
inline Bytes below(const Bytes& bytes, std::uint8_t top) {
  Bytes distances;
  for (int i = 0; i < kBlock; ++i) distances.v[i] = static_cast<std::uint8_t>(top - bytes.v[i]);
  return distances;
}

// Stores one element of a block into the output, after the block: a narrow store into the block
// would delay the wide loads that copy it.
template <class T>
inline void put_element(std::byte* out, int i, T element) {
  std::memcpy(out + i * sizeof(T), &element, sizeof(T));
}

template <class T>
inline bool all_zero(const Block<T>& block) {
  T any = 0;
  for (int i = 0; i < kBlock; ++i) any |= block.v[i];
  return any == 0;
}

// What the payload says of a block, before all blocks' bodies: as many of these bytes as the codec
// has use for.
struct Header {
  std::uint8_t base;
  std::uint8_t mode;
  std::uint8_t escaped;  // elements that follow apart
  std::uint8_t marked;   // elements of which a part follows apart; fp32 only
};

// Modes, beside the widths of fixed.inl (2 to 27) and window.inl.
constexpr std::uint8_t kZeroMode = 0;  // all elements are zero bits, and take no bytes
constexpr std::uint8_t kRawMode = 0xFF;

// How many bytes a block has in each of the payload's two parts.
struct Extent {
  std::size_t rows;
  std::size_t tail;
};
