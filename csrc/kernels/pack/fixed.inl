// Fixed point: a block of fp32 numbers as multiples of one power of two, sign and magnitude in
// fields of one width. Sums of a few 16-bit numbers fill 24 bits of mantissa with zeros at the
// lower end; this is what takes them out. Numbers whose lowest bit lies up to four bits lower are
// marked in a bit plane, and four bits more of each follow. Minus zero's field, where not marked,
// stands for what fits neither way and follows whole: a still lower bit, a greater magnitude, -0,
// subnormals, infinities, NaNs.
//
// All of it is integer arithmetic, but for conversions of integers that fp32 holds exactly, so it
// does not depend on the floating-point environment.

// --- Fields of one width: 4 lanes of 32 fields, each lane a string of bits, the lanes' 32-bit
// words in turn. So a row of four elements needs at most two rows of words.

using Row = std::uint32_t __attribute__((vector_size(16)));
constexpr int kLanes = 4;
constexpr int kRowBytes = sizeof(Row);

// A vector of rows, stored as one: it is loaded as one.
inline void put_rows(const Row* rows, std::uint32_t* to) {
#if defined(__AVX512F__)
  __m512i all = _mm512_castsi128_si512((__m128i)rows[0]);
  all = _mm512_inserti32x4(all, (__m128i)rows[1], 1);
  all = _mm512_inserti32x4(all, (__m128i)rows[2], 2);
  _mm512_store_si512(to, _mm512_inserti32x4(all, (__m128i)rows[3], 3));
#elif defined(__AVX2__)
  _mm256_store_si256(reinterpret_cast<__m256i*>(to),
                     _mm256_set_m128i((__m128i)rows[1], (__m128i)rows[0]));
#else
  __builtin_memcpy(to, rows, kRowBytes);
#endif
}

template <int kWidth>
void store_fields(const Words& fields, std::byte* to) {
  Row word{};
#pragma GCC unroll 32
  for (int i = 0; i < kBlock / kLanes; ++i) {
    Row field;
    __builtin_memcpy(&field, fields.v + kLanes * i, kRowBytes);
    const int bit = i * kWidth % 32;
    word = bit == 0 ? field : word | field << bit;
    if (bit + kWidth < 32) continue;
    __builtin_memcpy(to, &word, kRowBytes);
    to += kRowBytes;
    if (bit + kWidth > 32) word = field >> (32 - bit) % 32;
  }
}

template <int kWidth>
void load_fields(const std::byte* from, Words& fields) {
  constexpr int kRows = kVectorBytes / kRowBytes;
  Row word{}, rows[kRows];
#pragma GCC unroll 32
  for (int i = 0; i < kBlock / kLanes; ++i) {
    const int bit = i * kWidth % 32;
    Row field = word >> bit;
    if (bit == 0 || bit + kWidth > 32) {
      __builtin_memcpy(&word, from, kRowBytes);
      from += kRowBytes;
      field = bit == 0 ? word : field | word << (32 - bit) % 32;
    }
    rows[i % kRows] = field & ((1U << kWidth) - 1);
    if (i % kRows == kRows - 1) put_rows(rows, fields.v + kLanes * (i - kRows + 1));
  }
}

constexpr int kLeastWidth = 2, kMostWidth = 27;

struct FieldsOf {
  void (*store)(const Words& fields, std::byte* to);
  void (*load)(const std::byte* from, Words& fields);
};

template <std::size_t... kWidths>
FieldsOf fields_of(std::size_t width, std::index_sequence<kWidths...>) {
  static constexpr FieldsOf kTable[] = {
      {store_fields<kLeastWidth + kWidths>, load_fields<kLeastWidth + kWidths>}...};
  return kTable[width - kLeastWidth];
}

inline FieldsOf fields_of(std::size_t width) {
  return fields_of(width, std::make_index_sequence<kMostWidth - kLeastWidth + 1>());
}

// --- Vectors of elements, or of their parts.

using Vec = std::uint32_t __attribute__((vector_size(kVectorBytes)));
using Signed = std::int32_t __attribute__((vector_size(kVectorBytes)));
using Floats = float __attribute__((vector_size(kVectorBytes)));
constexpr int kStep = kVectorBytes / 4;

inline Vec vec_at(const Words& words, int i) {
  Vec vec;
  __builtin_memcpy(&vec, words.v + i, sizeof(vec));
  return vec;
}

inline void put_vec(Words& words, int i, Vec vec) {
  __builtin_memcpy(words.v + i, &vec, sizeof(vec));
}

inline Vec exponent_of(Vec bits) { return bits >> 23 & 0xFF; }
inline Signed is_usable(Vec exponent) { return exponent - 1 < 254; }

// The bits of integers below 2^30 as floats.
inline Vec float_bits_of(Vec integers) {
  return (Vec) __builtin_convertvector((Signed)integers, Floats);
}

inline int largest(Vec vec) {
  std::uint32_t found = 0;
  for (int lane = 0; lane < kStep; ++lane) found = found < vec[lane] ? vec[lane] : found;
  return static_cast<int>(found);
}

inline Bytes narrowed(const Words& words) {
  Bytes bytes;
  for (int i = 0; i < kBlock; ++i) bytes.v[i] = static_cast<std::uint8_t>(words.v[i]);
  return bytes;
}

struct Fixed {
  static constexpr std::uint32_t kEscape = 1;  // minus zero
  static constexpr int kMore = 4;              // bits that follow of a marked number

  struct Plan {
    Words depths;  // of each lowest bit below the top; 255 for what never fits
    Words drops;   // of each highest bit below the top; 255 for zeros and what never fits
    Bytes narrow_depths, narrow_drops;
    Header header;  // base: the greatest exponent that fits; mode: the width
    Extent extent;
    int depth;       // the greatest that fits into a field
    int drop;        // the least
    bool two_parts;  // some are marked
    Mask marked, escaped;
    std::size_t bytes() const { return extent.rows + extent.tail; }
  };

  static bool is_mode(std::uint8_t mode) { return mode >= kLeastWidth && mode <= kMostWidth; }

  static Extent extent(Header header) {
    const int plane = header.marked != 0 ? kPlaneBytes : 0;
    return {static_cast<std::size_t>(header.mode * kRowBytes + plane),
            (header.marked + 1U) / 2 + header.escaped * sizeof(std::uint32_t)};
  }

  static void plan(const Words& block, Plan& plan) {
    Vec tops{};
    for (int i = 0; i < kBlock; i += kStep) {
      const Vec exponent = exponent_of(vec_at(block, i));
      const Vec usable = exponent == 0xFF ? Vec{} : exponent;
      tops = tops < usable ? usable : tops;
    }
    const auto top = static_cast<std::uint32_t>(largest(tops));
    Vec deepest{};
    for (int i = 0; i < kBlock; i += kStep) {
      const Vec bits = vec_at(block, i), exponent = exponent_of(bits);
      const Vec mantissa = (bits & 0x7FFFFF) | 0x800000;
      // Its lowest bit alone, as a float, has that bit's number for an exponent.
      const Vec lowest = float_bits_of(mantissa & -mantissa) >> 23;
      const Vec drop = top - exponent, depth = drop + (23 + 127) - lowest;
      const Vec never = bits == 0 ? Vec{} : Vec{} + 255;
      const Vec seen = is_usable(exponent) ? depth : never;
      const Vec fit = seen < 255 ? seen : Vec{};
      deepest = deepest < fit ? fit : deepest;
      put_vec(plan.depths, i, seen < 255 ? seen : Vec{} + 255);
      put_vec(plan.drops, i, is_usable(exponent) ? drop : Vec{} + 255);
    }
    plan.narrow_depths = narrowed(plan.depths);
    plan.narrow_drops = narrowed(plan.drops);
    choose(plan, static_cast<int>(top), largest(deepest));
    const Mask above = ~at_least(plan.narrow_drops, static_cast<std::uint8_t>(plan.drop));
    plan.escaped = deeper(plan, plan.two_parts ? plan.depth + kMore : plan.depth) | above;
    plan.marked = deeper(plan, plan.depth) & ~plan.escaped;
    const int escaped = count(plan.escaped);
    plan.header = {static_cast<std::uint8_t>(static_cast<int>(top) - plan.drop),
                   static_cast<std::uint8_t>(plan.depth - plan.drop + 2),
                   static_cast<std::uint8_t>(escaped),
                   static_cast<std::uint8_t>(count(plan.marked))};
    plan.extent = escaped == kBlock ? Extent{sizeof(block), 0} : extent(plan.header);
  }

  static void encode(const Words& block, const Plan& plan, std::byte* rows, std::byte* tail) {
    Words fields, lower;
    const std::uint32_t shift = plan.header.base + 33U - kMore - plan.header.mode;
    const auto depth = static_cast<std::uint32_t>(plan.depth + (plan.two_parts ? kMore : 0));
    const auto drop = static_cast<std::uint32_t>(plan.drop);
    for (int i = 0; i < kBlock; i += kStep) {
      const Vec bits = vec_at(block, i), exponent = exponent_of(bits);
      const Vec left = exponent == 0 ? Vec{} : bits << 8 | 0x80000000;
      const Vec magnitude = left >> ((shift - exponent) & 31);  // below 32 for all that fit
      const Vec field = magnitude >> kMore << 1 | bits >> 31;
      const Signed fits = (vec_at(plan.depths, i) <= depth) & (vec_at(plan.drops, i) >= drop);
      put_vec(fields, i, fits ? field : Vec{} + kEscape);
      put_vec(lower, i, magnitude);
    }
    fields_of(plan.header.mode).store(fields, rows);
    if (plan.header.marked != 0) {
      store_plane(rows + plan.header.mode * kRowBytes, plan.marked);
      tail += store_lower(lower, plan.marked, tail);
    }
    for_each(plan.escaped, [&](int i) {
      std::memcpy(tail, block.v + i, sizeof(std::uint32_t));
      tail += sizeof(std::uint32_t);
    });
  }

  static bool decode(Header header, const std::byte* rows, const std::byte* tail,
                     std::size_t readable, std::byte* out) {
    Words fields, block;
    fields_of(header.mode).load(rows, fields);
    Mask marked{};
    Words lower;
    if (header.marked != 0) {
      marked = load_plane(rows + header.mode * kRowBytes);
      if (count(marked) != header.marked) return false;
      tail += load_lower(tail, readable, marked, lower);
    } else {
      lower = {};
    }
    const Mask escaped = equal_to(fields, kEscape) & ~marked;
    if (count(escaped) != header.escaped) return false;
    // A magnitude's highest bit can be its field's width - 2, and kMore: it stands for the base.
    const std::uint32_t rebias = (header.base + 2U - kMore - header.mode - 127U) << 23;
    for (int i = 0; i < kBlock; i += kStep) {
      const Vec field = vec_at(fields, i);
      const Vec magnitude = field >> 1 << kMore | vec_at(lower, i);
      const Vec number = float_bits_of(magnitude) + rebias;
      put_vec(block, i, (magnitude == 0 ? Vec{} : number) | field << 31);
    }
    copy_vectors<sizeof(block)>(out, &block);
    for_each(escaped, [&](int i) {
      std::memcpy(out + i * sizeof(std::uint32_t), tail, sizeof(std::uint32_t));
      tail += sizeof(std::uint32_t);
    });
    return true;
  }

 private:
  static constexpr int kMostDepth = kMostWidth - 2;
  static constexpr int kEscapeBits = 32;

  static Mask deeper(const Plan& plan, int depth) {
    return at_least(plan.narrow_depths, static_cast<std::uint8_t>(depth + 1));
  }

  // The marked numbers' lower bits, two to a byte, the first in its lower half. All that could be
  // marked are moved: a loop over those that are ends where no CPU foresees it. Both return the
  // bytes that count.
  static std::size_t store_lower(const Words& lower, Mask marked, std::byte* to) {
    std::uint8_t found[kGatherRoom] = {};
    const auto numbers = static_cast<std::size_t>(gather(lower, marked, found));
    found[numbers] = 0;
    for (int i = 0; i < kBlock / 2; ++i)
      to[i] = static_cast<std::byte>((found[2 * i] & 15) | found[2 * i + 1] << 4);
    return (numbers + 1) / 2;
  }

  static std::size_t load_lower(const std::byte* from, std::size_t readable, Mask marked,
                                Words& lower) {
    const auto bytes = static_cast<std::size_t>(count(marked) + 1) / 2;
    std::uint8_t halves[kBlock / 2];
    if (readable >= sizeof(halves))  // almost always; bytes of a varying number would be slow
      copy_vectors<sizeof(halves)>(halves, from);
    else
      std::memcpy(halves, from, bytes);
    std::uint8_t found[kGatherRoom];
    for (int i = 0; i < kBlock / 2; ++i) {
      found[2 * i] = halves[i] & 15;
      found[2 * i + 1] = halves[i] >> 4;
    }
    scatter(found, marked, lower);
    return bytes;
  }

  // The lower end, with and without marked numbers, then the upper, each for itself, by the bits
  // that a block takes.
  static void choose(Plan& plan, int top, int deepest) {
    int deeper_by[kMostDepth + kMore + 1];  // how many are deeper
    const int never = count(deeper(plan, 254));
    const int first = deepest < kMostDepth ? deepest : kMostDepth;
    for (int depth = first + 1; depth <= first + kMore; ++depth)
      deeper_by[depth] = depth < deepest ? count(deeper(plan, depth)) : never;
    int best = kBlock * (kMostDepth + 2 + kEscapeBits) << 6;
    for (int depth = first; depth >= 0; --depth) {
      deeper_by[depth] = count(deeper(plan, depth));
      const int escaped = deeper_by[depth + kMore];
      if (kEscapeBits * escaped > best >> 6) break;  // there will be no fewer
      const int one = kBlock * depth + kEscapeBits * deeper_by[depth];
      const int two =
          kBlock * (depth + 1) + kEscapeBits * escaped + kMore * (deeper_by[depth] - escaped);
      // The bits, then which way, then the depth in one number: the least is the best, without a
      // branch that no CPU foresees.
      const int least = one <= two ? one << 6 | depth : two << 6 | 1 << 5 | depth;
      best = least < best ? least : best;
    }
    plan.two_parts = (best & 1 << 5) != 0;
    plan.depth = best & 31;
    int most = plan.drop = 0;
    for (int drop = 1; drop <= plan.depth && drop < top; ++drop) {
      const int higher =
          kBlock - count(at_least(plan.narrow_drops, static_cast<std::uint8_t>(drop)));
      if (kEscapeBits * higher >= kBlock * plan.depth) break;
      if (kBlock * drop - kEscapeBits * higher <= most) continue;
      most = kBlock * drop - kEscapeBits * higher;
      plan.drop = drop;
    }
  }
};
