// The one pass over a tensor, block by block. It computes x + held, sees whether all of it is
// finite, and collects candidates: the elements whose key is at least a guess, in ascending order.

constexpr std::size_t kBlockElements = 64;
constexpr std::size_t kFewCandidates = 4;  // of a block: as many are stored without a branch

// `indices` and `values` have room for kBlockElements more than are ever in them.
struct Candidates {
  std::uint32_t* indices;
  float* values;
  std::size_t count;
  std::uint32_t least;  // the guess
};

// `values` are the block's elements; bit i of the mask: element i is a candidate.
inline void collect(const float* values, std::uint64_t mask, std::uint32_t first,
                    Candidates& candidates) {
  std::uint32_t* indices = candidates.indices + candidates.count;
  float* to = candidates.values + candidates.count;
  const auto many = static_cast<std::size_t>(__builtin_popcountll(mask));
  candidates.count += many;
  if (many <= kFewCandidates) {
    for (std::size_t i = 0; i < kFewCandidates; ++i, mask &= mask - 1) {
      const int at = __builtin_ctzll(mask | std::uint64_t{1} << 63);  // when there is none: any
      indices[i] = first + static_cast<std::uint32_t>(at);
      to[i] = values[at];
    }
    return;
  }
  for (std::size_t i = 0; i < kBlockElements; i += kLanes) {
    const auto lanes = static_cast<LaneMask>(mask >> i) & (kLanes == 32 ? ~0U : (1U << kLanes) - 1);
    store(indices, compress(ascending_from(first + static_cast<std::uint32_t>(i)), lanes));
    store(to, compress(load<Floats>(values + i), lanes));
    indices += count(lanes);
    to += count(lanes);
  }
}

// Elements first to first + count of a tensor.
struct Part {
  std::size_t first, count;
};

// Vectors at `i` of a block: x + held into `left` and `near`, and which are candidates.
template <class Type, bool kHeld, bool kPast>
inline std::uint64_t scan_lanes(const typename Type::Stored* x, const float* held, float* left,
                                float* near, std::size_t i, std::uint32_t least, Keys& largest) {
  Floats c = widen_lanes<Type>(x + i);
  if constexpr (kHeld) c += load<Floats>(held + i);
  if constexpr (kPast)
    store_past_caches(left + i, c);
  else
    store(left + i, c);
  store(near + i, c);
  const Keys keys = keys_of(c);
  largest = larger(largest, keys);
  return std::uint64_t{at_least(keys, least)} << i;
}

// A block of kBlockElements.
template <class Type, bool kHeld, bool kPast>
inline std::uint64_t scan_block(const typename Type::Stored* x, const float* held, float* left,
                                float* near, std::uint32_t least, Keys& largest) {
  std::uint64_t mask = 0;
  for (std::size_t i = 0; i < kBlockElements; i += kLanes)
    mask |= scan_lanes<Type, kHeld, kPast>(x, held, left, near, i, least, largest);
  return mask;
}

// A block of fewer elements; the last ones singly. (A copy as long as a vector would have to wait
// until all older stores have left.)
template <class Type, bool kHeld>
inline std::uint64_t scan_short_block(const typename Type::Stored* x, const float* held,
                                      std::size_t count, float* left, float* near,
                                      std::uint32_t least, Keys& largest) {
  std::uint64_t mask = 0;
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    mask |= scan_lanes<Type, kHeld, false>(x, held, left, near, i, least, largest);
  std::uint32_t most = 0;
  for (; i < count; ++i) {
    float c = Type::widen(x[i]);
    if constexpr (kHeld) c += held[i];
    left[i] = near[i] = c;
    most = std::max(most, key_of(c));
    mask |= std::uint64_t{key_of(c) >= least} << i;
  }
  largest = larger(largest, Keys{} + static_cast<std::int32_t>(most));
  return mask;
}

// One pass over a part.
template <class Type, bool kHeld, bool kPast, bool kCollect>
void scan_as(const Gradient& gradient, Part part, Candidates& found, Keys& found_largest) {
  alignas(64) float near[kBlockElements] = {};  // a short block leaves some of it
  const auto* const x = static_cast<const typename Type::Stored*>(gradient.x);
  Candidates candidates = found;  // in registers
  Keys largest = found_largest;
  std::size_t at = part.first;
  const std::size_t end = part.first + part.count;
  const auto take_in = [&](std::uint64_t mask, std::size_t count) {
    if constexpr (kCollect) collect(near, mask, static_cast<std::uint32_t>(at), candidates);
    at += count;
  };
  const auto short_block = [&](std::size_t count) {
    if (count == 0) return;
    take_in(scan_short_block<Type, kHeld>(x + at, kHeld ? gradient.held + at : nullptr, count,
                                          gradient.left + at, near, candidates.least, largest),
            count);
  };
  if constexpr (kPast) {
    const std::size_t begun = reinterpret_cast<std::uintptr_t>(gradient.left + at) / 4 % 16;
    short_block(std::min(part.count, (16 - begun) % 16));
  }
  while (end - at >= kBlockElements)
    take_in(scan_block<Type, kHeld, kPast>(x + at, kHeld ? gradient.held + at : nullptr,
                                           gradient.left + at, near, candidates.least, largest),
            kBlockElements);
  short_block(end - at);
  found = candidates;
  found_largest = largest;
}

template <bool kCollect>
void scan(const Gradient& gradient, bool past_caches, Part part, Candidates& candidates,
          Keys& largest) {
  with_type(gradient.dtype, [&](auto type) {
    using Type = decltype(type);
    const auto chosen = past_caches                ? gradient.held != nullptr
                                                         ? scan_as<Type, true, true, kCollect>
                                                         : scan_as<Type, false, true, kCollect>
                        : gradient.held != nullptr ? scan_as<Type, true, false, kCollect>
                                                   : scan_as<Type, false, false, kCollect>;
    chosen(gradient, part, candidates, largest);
  });
}

inline bool is_finite(Keys largest) { return at_least(largest, kInfinity) == 0; }

// Whether stores past the caches pay: the array is more than stays in them until it is read again.
inline bool past_caches(const Gradient& gradient) {
  constexpr std::size_t kLarge = std::size_t{4} << 20;  // bytes
  return gradient.count * sizeof(float) >= kLarge &&
         reinterpret_cast<std::uintptr_t>(gradient.left) % sizeof(float) == 0;
}
