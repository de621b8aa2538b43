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
  return select(gradient.left, gradient.count, threshold.key, threshold.ties, indices, k);
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
