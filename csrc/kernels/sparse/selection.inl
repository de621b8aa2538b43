// Which elements are sent: selection in steps, the threshold, the scan, top-k.

// Selection in steps: histogram and take.

// Neighbours often have the same bin: each of four counts in a table of its own.
template <int kBits>
void histogram_apart(const float* left, std::size_t count, int shift, int bits,
                     std::uint32_t prefix, std::uint32_t* bins) {
  std::uint32_t tables[4][1 << kBits] = {};
  const std::uint32_t within = (1U << bits) - 1;
  const auto one = [&](float value, std::uint32_t* table) {
    const std::uint64_t key = key_of(value);
    if (key >> (shift + bits) == prefix) ++table[key >> shift & within];
  };
  std::size_t i = 0;
  for (; i + 4 <= count; i += 4)
    for (std::size_t lane = 0; lane < 4; ++lane) one(left[i + lane], tables[lane]);
  for (; i < count; ++i) one(left[i], tables[0]);
  for (std::uint32_t bin = 0; bin <= within; ++bin)
    bins[bin] += tables[0][bin] + tables[1][bin] + tables[2][bin] + tables[3][bin];
}

void histogram(const float* left, std::size_t count, int shift, int bits, std::uint32_t prefix,
               std::uint32_t* bins) {
  constexpr int kApart = 11;
  if (bits <= kApart) {
    histogram_apart<kApart>(left, count, shift, bits, prefix, bins);
    return;
  }
  const std::uint32_t within = (1U << bits) - 1;
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint64_t key = key_of(left[i]);
    if (key >> (shift + bits) == prefix) ++bins[key >> shift & within];
  }
}

template <class Type>
void take_as(float* left, const std::uint32_t* indices, std::size_t count, void* values) {
  auto* const out = static_cast<typename Type::Stored*>(values);
  for (std::size_t i = 0; i < count; ++i) {
    float& from = left[indices[i]];
    out[i] = narrow_saturated<Type>(from);
    from -= Type::widen(out[i]);
  }
}

void take(float* left, const std::uint32_t* indices, std::size_t count, Dtype dtype, void* values) {
  with_type(dtype, [&](auto type) { take_as<decltype(type)>(left, indices, count, values); });
}

// Which elements come first in the order: the k-th key, all above it, and the first of those that
// have it.

struct Threshold {
  std::uint32_t key;
  std::size_t ties;  // how many of those that have that key are selected
};

// Up to so many elements a search by halves is faster than a histogram.
constexpr std::size_t kMostSearched = 1 << 19;

// Calls visit(keys) for all vectors; the last is padded with zeros.
template <class Visit>
inline void for_keys(const float* values, std::size_t count_of, const Visit& visit) {
  std::size_t i = 0;
  for (; i + kLanes <= count_of; i += kLanes) visit(keys_of(load<Floats>(values + i)));
  if (i == count_of) return;
  float rest[kLanes] = {};
  std::memcpy(rest, values + i, (count_of - i) * sizeof(float));
  visit(keys_of(load<Floats>(rest)));
}

inline std::uint32_t largest_of(Keys keys) {
  std::int32_t largest = 0;
  for (std::size_t i = 0; i < kLanes; ++i) largest = std::max(largest, keys[i]);
  return static_cast<std::uint32_t>(largest);
}

// The k-th largest of a vector's keys.
inline std::uint32_t kth_of_vector(Keys keys, std::size_t k) {
  std::uint32_t least = kMagnitude;
  for (std::size_t i = 0; i < kLanes; ++i) {
    const auto key = static_cast<std::uint32_t>(keys[i]);
    const bool among_k = count(at_least(keys, key + 1)) < k;
    least = among_k && key < least ? key : least;
  }
  return least;
}

// The threshold of the `many` keys that for_all(visit) visits; it is at least `low`. Bisects until
// one vector holds the keys that are left.
template <class ForAll>
inline Threshold search_threshold(std::size_t many, std::size_t k, std::uint32_t low,
                                  const ForAll& for_all) {
  Keys largest = {};
  for_all([&](Keys keys) { largest = larger(largest, keys); });
  std::uint32_t high = largest_of(largest);
  std::size_t from = many, above = 0;  // how many have `low` or more, and more than `high`
  while (low < high && from - above > kLanes) {
    const std::uint32_t middle = high - (high - low) / 2;
    std::size_t found = 0;
    for_all([&](Keys keys) { found += count(at_least(keys, middle)); });
    const bool enough = found >= k;  // a branch would be taken half of the time
    low = enough ? middle : low;
    from = enough ? found : from;
    high = enough ? high : middle - 1;
    above = enough ? above : found;
  }
  if (low == high) return {low, k - above};
  std::int32_t left[2 * kLanes] = {};
  std::size_t found = 0;
  for_all([&](Keys keys) {
    const LaneMask mask = at_least(keys, low) & ~at_least(keys, high + 1);
    if (mask == 0) return;
    store(left + found, compress(keys, mask));
    found += count(mask);
  });
  for (std::size_t i = found; i < 2 * kLanes; ++i) left[i] = 0;
  const auto keys = load<Keys>(left);
  const std::uint32_t key = kth_of_vector(keys, k - above);
  return {key, k - above - count(at_least(keys, key + 1))};
}

// For so few that their keys stay in cache.
inline Threshold threshold_of_few(const float* values, std::size_t many, std::size_t k,
                                  std::uint32_t low) {
  return search_threshold(many, k, low, [&](const auto& visit) { for_keys(values, many, visit); });
}

// For so few that a copy costs nothing.
constexpr std::size_t kVeryFew = 256;

inline Threshold threshold_of_very_few(const float* values, std::size_t many, std::size_t k,
                                       std::uint32_t low) {
  Keys copy[kVeryFew / kLanes];
  std::size_t vectors = 0;
  for_keys(values, many, [&](Keys keys) { copy[vectors++] = keys; });
  return search_threshold(many, k, low, [&](const auto& visit) {
    for (std::size_t i = 0; i < vectors; ++i) visit(copy[i]);
  });
}

// For many: a histogram of the highest 11 bits finds those of the k-th key, a second one the next
// 10 bits, and a third one the last 10.
inline Threshold histogram_threshold(const float* values, std::size_t count, std::size_t k) {
  constexpr int kShifts[] = {20, 10, 0}, kBits[] = {11, 10, 10};
  std::uint32_t prefix = 0;
  for (int step = 0; step < 3; ++step) {
    std::uint32_t bins[1 << 11] = {};
    histogram(values, count, kShifts[step], kBits[step], prefix, bins);
    std::uint32_t bin = (1U << kBits[step]) - 1;
    for (; bins[bin] < k; --bin) k -= bins[bin];
    prefix = prefix << kBits[step] | bin;
  }
  return {prefix, k};
}

// The threshold of the k-th element in the order, 1 <= k <= count. Its key is at least `low`.
inline Threshold find_threshold(const float* values, std::size_t count, std::size_t k,
                                std::uint32_t low = 0) {
  return count <= kVeryFew        ? threshold_of_very_few(values, count, k, low)
         : count <= kMostSearched ? threshold_of_few(values, count, k, low)
                                  : histogram_threshold(values, count, k);
}

// Calls put(lanes of the first of up to kLanes elements, mask) for those that are selected.
template <class Put>
inline bool for_selected(const float* values, std::size_t count_of, std::uint32_t key,
                         std::size_t ties, const Put& put) {
  const auto next = [&](Keys keys, std::size_t at, LaneMask among) {
    LaneMask mask = at_least(keys, key) & among;
    if (mask == 0) return true;
    LaneMask above = key == kMagnitude ? 0 : at_least(keys, key + 1) & among;
    for (LaneMask equal = mask & ~above; equal != 0 && ties != 0; equal &= equal - 1, --ties)
      above |= equal & -equal;
    return above == 0 || put(at, above);
  };
  std::size_t i = 0;
  for (; i + kLanes <= count_of; i += kLanes)
    if (!next(keys_of(load<Floats>(values + i)), i, ~LaneMask{0})) return false;
  if (i == count_of) return true;
  float rest[kLanes] = {};
  std::memcpy(rest, values + i, (count_of - i) * sizeof(float));
  return next(keys_of(load<Floats>(rest)), i, (LaneMask{1} << (count_of - i)) - 1);
}

// Stores the lanes of the mask, the first of them where there is no more room, and touches no more
// than `room` elements.
inline void store_lanes(std::uint32_t* to, Words vector, LaneMask mask, std::size_t room) {
  const Words found = compress(vector, mask);
  if (room >= kLanes)
    store(to, found);
  else
    std::memcpy(to, &found, std::min(count(mask), room) * sizeof(*to));
}

std::size_t select(const float* left, std::size_t count_of, std::uint32_t key, std::size_t ties,
                   std::uint32_t* indices, std::size_t room) {
  std::size_t found = 0;
  for_selected(left, count_of, key, ties, [&](std::size_t at, LaneMask mask) {
    const std::size_t left_over = room - found;
    store_lanes(indices + found, ascending_from(static_cast<std::uint32_t>(at)), mask, left_over);
    found += std::min(count(mask), left_over);
    return found < room;
  });
  return found;
}

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

// Exact top-k. A guess of the k-th key lets one pass over the tensor collect all candidates, and
// the choice among these is exact. If the guess is too low there are too many candidates, and they
// are thinned out during the pass. If it is too high there are too few, and the whole tensor is
// searched.

// Memory for candidates, in one allocation. When it is freed and allocated again, glibc finds it in
// place. Two allocations would go back to the system and cost a page fault for each page.
class CandidateMemory {
 public:
  explicit CandidateMemory(std::size_t candidates)
      : count_(candidates + kBlockElements), words_(new std::uint32_t[2 * count_]) {}
  Candidates none(std::uint32_t least) const {
    return {words_.get(), reinterpret_cast<float*>(words_.get() + count_), 0, least};
  }

 private:
  std::size_t count_;
  std::unique_ptr<std::uint32_t[]> words_;
};

// Keeps the first k candidates. A later candidate with an equal key comes after these.
inline void thin_out(Candidates& candidates, std::size_t k) {
  const Threshold threshold =
      find_threshold(candidates.values, candidates.count, k, candidates.least);
  std::size_t found = 0;
  // What is stored never overtakes what is loaded: whole vectors may be stored.
  for_selected(candidates.values, candidates.count, threshold.key, threshold.ties,
               [&](std::size_t at, LaneMask mask) {
                 const Words indices = compress(load<Words>(candidates.indices + at), mask);
                 const Floats values = compress(load<Floats>(candidates.values + at), mask);
                 store(candidates.indices + found, indices);
                 store(candidates.values + found, values);
                 found += count(mask);
                 return true;
               });
  candidates.count = found;
  candidates.least = threshold.key + 1;
}

// The indices of the k candidates that come first.
inline void choose(const Candidates& candidates, const Threshold& threshold, std::size_t k,
                   std::uint32_t* indices) {
  std::size_t found = 0;
  for_selected(candidates.values, candidates.count, threshold.key, threshold.ties,
               [&](std::size_t at, LaneMask mask) {
                 store_lanes(indices + found, load<Words>(candidates.indices + at), mask,
                             k - found);
                 found += count(mask);
                 return true;
               });
}

// What a sample says: a key that most likely a few more than k elements reach, and how many.
struct Guess {
  std::uint32_t least;
  std::size_t expected;
};

constexpr std::size_t kSample = 8192;
constexpr std::size_t kLeastSampled = 4 * kSample;  // elements

// The tensor is cut into kSample pieces, and one element of each is sampled, at irregular
// distances.
template <class Type>
Guess guess_as(const Gradient& gradient, std::size_t k) {
  const auto* const x = static_cast<const typename Type::Stored*>(gradient.x);
  const std::size_t piece = gradient.count / kSample;
  const std::unique_ptr<float[]> sample(new float[kSample]);
  for (std::size_t i = 0; i < kSample; ++i) {
    const std::uint64_t mixed = (i + 1) * 0x9E3779B97F4A7C15 >> 32;
    const std::size_t at = i * piece + static_cast<std::size_t>(mixed * piece >> 32);
    sample[i] = Type::widen(x[at]) + (gradient.held != nullptr ? gradient.held[at] : 0.0F);
  }
  // `mean` of the sample are expected among the first k, with that variance: four deviations more.
  const std::size_t mean = kSample * k / gradient.count;
  std::size_t rank = mean + 4;
  while ((rank - mean - 4) * (rank - mean - 4) < 16 * mean) ++rank;
  return {find_threshold(sample.get(), kSample, rank).key, rank * (gradient.count / kSample + 1)};
}

bool add(const Gradient& gradient) {
  Candidates none{nullptr, nullptr, 0, kMagnitude};
  Keys largest = {};
  scan<false>(gradient, past_caches(gradient), {0, gradient.count}, none, largest);
  end_of_stores();
  return is_finite(largest);
}

// After so many elements candidates are counted, and thinned out if they are too many.
constexpr std::size_t kPiece = 1 << 14;

// With more than an eighth of all selected, candidates would be most of the tensor.
constexpr std::size_t kMostGuessed = 8;

std::int64_t top_k_searched(const Gradient& gradient, std::size_t k, std::uint32_t* indices) {
  const Threshold threshold = find_threshold(gradient.left, gradient.count, k);
  return static_cast<std::int64_t>(
      select(gradient.left, gradient.count, threshold.key, threshold.ties, indices, k));
}

std::int64_t top_k(const Gradient& gradient, std::size_t k, std::uint32_t* indices) {
  const std::size_t n = gradient.count;
  if (k == 0 || k > n / kMostGuessed || n < kLeastSampled) {
    if (!add(gradient)) return kNotFinite;
    if (k == 0) return 0;
    return top_k_searched(gradient, k, indices);
  }
  const Guess guess =
      with_type(gradient.dtype, [&](auto type) { return guess_as<decltype(type)>(gradient, k); });
  const std::size_t room = std::min(n, k + 2 * guess.expected);
  const CandidateMemory memory(room + kPiece);
  Candidates candidates = memory.none(guess.least);
  Keys largest = {};
  const bool past = past_caches(gradient);
  for (std::size_t at = 0; at < n; at += kPiece) {
    scan<true>(gradient, past, {at, std::min(kPiece, n - at)}, candidates, largest);
    // Before any choice: there is no key above that of the largest NaN.
    if (!is_finite(largest)) break;
    if (candidates.count > room) thin_out(candidates, k);
  }
  end_of_stores();
  if (!is_finite(largest)) return kNotFinite;
  if (candidates.count < k) return top_k_searched(gradient, k, indices);
  choose(candidates, find_threshold(candidates.values, candidates.count, k, guess.least), k,
         indices);
  return static_cast<std::int64_t>(k);
}

// How far below the k-th key of a chunk the guess for the next chunk is: further after a guess that
// was too high, less after one with many candidates. 2^23 is a factor of two.
constexpr std::uint32_t kLeastMargin = 1 << 18, kFirstMargin = 1 << 20, kMostMargin = 1 << 25;

// A chunk that was scanned and waits for the choice. It waits until the next chunk was scanned,
// too: its candidates were stored behind stores past the caches, and a load would wait for those.
class Chunk {
 public:
  explicit Chunk(std::size_t size) : memory_(size), candidates_(memory_.none(0)) {}

  void scan_part(const Gradient& gradient, bool past, Part part, std::uint32_t least,
                 Keys& largest) {
    part_ = part;
    candidates_ = memory_.none(least);
    scan<true>(gradient, past, part, candidates_, largest);
    left_ = gradient.left + part.first;
  }

  // The key of the k-th.
  std::uint32_t choose_from(std::size_t k, std::uint32_t* indices) const {
    if (!guessed(k)) {
      const Threshold threshold = find_threshold(left_, part_.count, k);
      select(left_, part_.count, threshold.key, threshold.ties, indices, k);
      for (std::size_t i = 0; i < k; ++i) indices[i] += static_cast<std::uint32_t>(part_.first);
      return threshold.key;
    }
    const Threshold threshold =
        find_threshold(candidates_.values, candidates_.count, k, candidates_.least);
    choose(candidates_, threshold, k, indices);
    return threshold.key;
  }
  bool guessed(std::size_t k) const { return candidates_.count >= k; }
  std::size_t candidates() const { return candidates_.count; }
  std::size_t count() const { return part_.count; }

 private:
  CandidateMemory memory_;
  Candidates candidates_;
  Part part_{0, 0};
  const float* left_ = nullptr;
};

std::int64_t top_k_chunks(const Gradient& gradient, std::size_t k, std::size_t chunk,
                          std::uint32_t* indices) {
  const bool past = past_caches(gradient);
  Chunk first(chunk), second(chunk);
  Chunk *waiting = &first, *next = &second;
  Keys largest = {};
  std::uint32_t least = kMagnitude, margin = kFirstMargin;
  const auto choose_from_waiting = [&] {
    const std::size_t wanted = selected_of(waiting->count(), k, chunk);
    const std::uint32_t key = waiting->choose_from(wanted, indices);
    if (!waiting->guessed(wanted))
      margin = std::min(2 * margin, kMostMargin);
    else if (waiting->candidates() > 2 * wanted)
      margin = std::max(margin - margin / 8, kLeastMargin);
    least = key > margin ? key - margin : 0;
    indices += wanted;
  };
  for (std::size_t at = 0; at < gradient.count; at += chunk) {
    next->scan_part(gradient, past, {at, std::min(chunk, gradient.count - at)}, least, largest);
    if (!is_finite(largest)) break;  // before any choice: see top_k
    if (at != 0) choose_from_waiting();
    std::swap(waiting, next);
  }
  if (is_finite(largest) && gradient.count != 0) choose_from_waiting();
  end_of_stores();
  if (!is_finite(largest)) return kNotFinite;
  return static_cast<std::int64_t>(selected_by_chunk(gradient.count, k, chunk));
}
