// Adds a leaf to the nodes that it completes. Included after combine.inl, in the same namespace.

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
    Step<float> value = Travelling<Codec>::in_order(Codec::load(leaf + i));
    for (int node = 0; node < n; ++node) value = apply<Sum>(value, Row::load(nodes[node] + i));
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
