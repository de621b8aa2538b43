// Selection in steps: histogram and take.

// Neighbours often have the same bin: each of four counts in a table of its own.
template <int kBits>
void histogram_apart(const float* left, std::size_t count, int shift, int bits,
                     std::uint32_t prefix, std::int64_t* bins) {
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
    bins[bin] += std::int64_t{tables[0][bin]} + tables[1][bin] + tables[2][bin] + tables[3][bin];
}

void histogram(const float* left, std::size_t count, int shift, int bits, std::uint32_t prefix,
               std::int64_t* bins) {
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
