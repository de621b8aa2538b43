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
    std::int64_t bins[1 << 11] = {};
    histogram(values, count, kShifts[step], kBits[step], prefix, bins);
    std::uint32_t bin = (1U << kBits[step]) - 1;
    for (; static_cast<std::size_t>(bins[bin]) < k; --bin) k -= static_cast<std::size_t>(bins[bin]);
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

// Stores the lanes of the mask, and touches no more than `room` elements, which are enough.
inline void store_lanes(std::uint32_t* to, Words vector, LaneMask mask, std::size_t room) {
  const Words found = compress(vector, mask);
  if (room >= kLanes)
    store(to, found);
  else
    std::memcpy(to, &found, count(mask) * sizeof(*to));
}

std::int64_t select(const float* left, std::size_t count_of, std::uint32_t key, std::size_t ties,
                    std::uint32_t* indices, std::size_t room) {
  std::size_t found = 0;
  const bool good = for_selected(left, count_of, key, ties, [&](std::size_t at, LaneMask mask) {
    if (count(mask) > room - found) return false;
    store_lanes(indices + found, ascending_from(static_cast<std::uint32_t>(at)), mask,
                room - found);
    found += count(mask);
    return true;
  });
  return good ? static_cast<std::int64_t>(found) : kNoRoom;
}
