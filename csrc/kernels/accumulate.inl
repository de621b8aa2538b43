// Adds a leaf to the nodes that it completes. Included after combine.inl, in the same namespace.

// Fetches what a step from memory will need soon. The hardware does that within a page, and stops
// at its end: where a leaf is copied past the caches, this takes a quarter of the time away.
template <class T>
inline void fetch_behind(const T* step) {
  constexpr std::uintptr_t kAhead = 1024, kLine = 64;  // bytes
  const auto next = reinterpret_cast<std::uintptr_t>(step) + kAhead;
  for (std::uintptr_t i = 0; i < kStep<float> * sizeof(T); i += kLine)
    __builtin_prefetch(reinterpret_cast<const void*>(next + i));
}

template <class Codec>
struct Accumulation {
  using T = typename Codec::Stored;
  using Row = Plain<float>;

  const T* leaf;
  const float* const* nodes;
  int n;
  float* out;

  // A step at i.
  Step<float> sum(std::size_t i) const {
    fetch_behind(leaf + i);
    Step<float> value = Travelling<Codec>::in_order(Codec::load(leaf + i));
    for (int node = 0; node < n; ++node) {
      fetch_behind(nodes[node] + i);
      value = apply<Sum>(value, Row::load(nodes[node] + i));
    }
    return value;
  }

  // Fewer elements than a step.
  void part(std::size_t i, std::size_t count) const {
    Padded<Codec> padded;
    padded.read(leaf + i, count);
    Step<float> value = Travelling<Codec>::in_order(Codec::load(padded.elements));
    Padded<Row> row;
    for (int node = 0; node < n; ++node) {
      row.read(nodes[node] + i, count);
      value = apply<Sum>(value, Row::load(row.elements));
    }
    Row::store(row.elements, value);
    row.write(out + i, count);
  }
};

// Past the caches, where the instruction set can. `to` is aligned to vectors.
inline void stream_step(float* to, Step<float> value) {
#if defined(__AVX512F__)
  _mm512_stream_ps(to, value.first);
  _mm512_stream_ps(to + kLanes<float>, value.second);
#elif defined(__AVX2__)
  _mm256_stream_ps(to, value.first);
  _mm256_stream_ps(to + kLanes<float>, value.second);
#else
  Plain<float>::store(to, value);
#endif
}

template <class Codec>
void accumulate(const void* leaf, const float* const* nodes, int n, float* out, std::size_t count,
                bool streaming) {
  const Accumulation<Codec> rows{static_cast<const typename Codec::Stored*>(leaf), nodes, n, out};
  constexpr std::size_t kElements = kStep<float>;
  std::size_t i = 0;
  if (streaming) {
    const std::size_t past = reinterpret_cast<std::uintptr_t>(out) % kVectorBytes;
    if (past != 0) {
      i = (kVectorBytes - past) / sizeof(float);
      if (i > count) i = count;
      rows.part(0, i);
    }
    for (; i + kElements <= count; i += kElements) stream_step(out + i, rows.sum(i));
    finish_stores();
  } else {
    for (; i + kElements <= count; i += kElements) Plain<float>::store(out + i, rows.sum(i));
  }
  if (i != count) rows.part(i, count - i);
}
