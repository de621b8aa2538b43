// Selection in steps: add, histogram, select, take.

template <class Type>
bool add_as(const Gradient& gradient) {
  const auto* x = static_cast<const typename Type::Stored*>(gradient.x);
  std::uint32_t largest = 0;
  for (std::size_t i = 0; i < gradient.count; ++i) {
    const float wide = Type::widen(x[i]);
    const float c = gradient.held != nullptr ? wide + gradient.held[i] : wide;
    gradient.left[i] = c;
    largest = largest < key_of(c) ? key_of(c) : largest;
  }
  return largest < kInfinity;
}

bool add(const Gradient& gradient) {
  return with_type(gradient.dtype, [&](auto type) { return add_as<decltype(type)>(gradient); });
}

void histogram(const float* left, std::size_t count, int shift, int bits, std::uint32_t prefix,
               std::int64_t* bins) {
  const std::uint32_t within = (1U << bits) - 1;
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint64_t key = key_of(left[i]);
    if (key >> (shift + bits) == prefix) ++bins[key >> shift & within];
  }
}

std::int64_t select(const float* left, std::size_t count, std::uint32_t key, std::size_t ties,
                    std::uint32_t* indices, std::size_t room) {
  std::size_t found = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t own = key_of(left[i]);
    if (own < key) continue;
    if (own == key) {
      if (ties == 0) continue;
      --ties;
    }
    if (found == room) return kNoRoom;
    indices[found++] = static_cast<std::uint32_t>(i);
  }
  return static_cast<std::int64_t>(found);
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
