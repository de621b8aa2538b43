// Exact top-k. The k-th key is found from its highest bits down: a histogram of 11 bits, of the 10
// below them where these are its own, and of the last 10.

struct Threshold {
  std::uint32_t key;
  std::size_t ties;  // how many of those that have that key are selected
};

// Of the k-th element in the order, 1 <= k <= count.
Threshold find_threshold(const float* left, std::size_t count, std::size_t k) {
  constexpr int kShifts[] = {20, 10, 0}, kBits[] = {11, 10, 10};
  std::uint32_t prefix = 0;
  for (int step = 0; step < 3; ++step) {
    std::int64_t bins[1 << 11] = {};
    histogram(left, count, kShifts[step], kBits[step], prefix, bins);
    std::uint32_t bin = (1U << kBits[step]) - 1;
    for (; static_cast<std::size_t>(bins[bin]) < k; --bin) k -= static_cast<std::size_t>(bins[bin]);
    prefix = prefix << kBits[step] | bin;
  }
  return {prefix, k};
}

std::int64_t top_k(const Gradient& gradient, std::size_t k, std::uint32_t* indices) {
  if (!add(gradient)) return kNotFinite;
  if (k == 0) return 0;
  const Threshold threshold = find_threshold(gradient.left, gradient.count, k);
  return select(gradient.left, gradient.count, threshold.key, threshold.ties, indices, k);
}

std::int64_t top_k_chunks(const Gradient& gradient, std::size_t k, std::size_t chunk,
                          std::uint32_t* indices) {
  if (!add(gradient)) return kNotFinite;
  std::size_t found = 0;
  for (std::size_t at = 0; at < gradient.count; at += chunk) {
    const std::size_t count = std::min(chunk, gradient.count - at);
    const std::size_t wanted = selected_of(count, k, chunk);
    const float* const left = gradient.left + at;
    const Threshold threshold = find_threshold(left, count, wanted);
    select(left, count, threshold.key, threshold.ties, indices + found, wanted);
    for (std::size_t i = 0; i < wanted; ++i) indices[found++] += static_cast<std::uint32_t>(at);
  }
  return static_cast<std::int64_t>(found);
}
