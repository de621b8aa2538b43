// An output that is written from its first byte to its last. A large one goes past the caches: its
// lines need not be read before they are written, and push out nothing that is still wanted. What
// does not fill a line waits in a tile for what follows, so that the output's alignment is free.
//
// After elements.h, in the same namespace.

class Stream {
 public:
  static constexpr std::size_t kRoom = 4096;  // bytes

  Stream(void* out, std::size_t bytes) : base_(static_cast<std::byte*>(out)) {
    if (!kStreams || bytes < kLeastStreamed) return;
    first_ = used_ = reinterpret_cast<std::uintptr_t>(out) % kLine;
    base_ -= first_;
    streams_ = true;
  }
  ~Stream() {
    if (!streams_) return;
    std::memcpy(base_ + first_, tile_ + first_, used_ - first_);
    fence();
  }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  // Where the next bytes are to be written, kRoom at most, before written() says how many.
  template <class T>
  T* room() {
    return reinterpret_cast<T*>(streams_ ? tile_ + used_ : base_);
  }
  void written(std::size_t bytes) {
    if (streams_)
      flush(used_ + bytes);
    else
      base_ += bytes;
  }

 private:
  static constexpr std::size_t kLine = 64;
  static constexpr std::size_t kLeastStreamed = std::size_t{1} << 20;

  void flush(std::size_t used) {
    std::size_t at = 0;
    if (first_ != 0 && used >= kLine) {  // what lies before the output stays as it is
      std::memcpy(base_ + first_, tile_ + first_, kLine - first_);
      first_ = 0;
      at = kLine;
    }
    for (; at + kLine <= used; at += kLine) stream_line(base_ + at, tile_ + at);
    const std::size_t whole = used / kLine * kLine;
    if (whole != 0) std::memcpy(tile_, tile_ + whole, kLine);
    base_ += whole;
    used_ = used - whole;
  }

#if defined(__AVX512F__)
  static constexpr bool kStreams = true;
  static void stream_line(std::byte* to, const std::byte* from) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_load_si512(from));
  }
  static void fence() { _mm_sfence(); }
#elif defined(__AVX2__)
  static constexpr bool kStreams = true;
  static void stream_line(std::byte* to, const std::byte* from) {
    for (std::size_t i = 0; i < kLine; i += 32)
      _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i),
                          _mm256_load_si256(reinterpret_cast<const __m256i*>(from + i)));
  }
  static void fence() { _mm_sfence(); }
#else
  static constexpr bool kStreams = false;
  static void stream_line(std::byte*, const std::byte*) {}
  static void fence() {}
#endif

  std::byte* base_;        // of the output's next line
  std::size_t first_ = 0;  // the tile's bytes before the output's first
  std::size_t used_ = 0;
  bool streams_ = false;
  alignas(kLine) std::byte tile_[kRoom + 2 * kLine];
};

// Writes error(c) of each of m elements, and asks for the next m on the way: by then nothing else
// does, as these are in the cache.
template <class In, class Error>
inline void put_errors(const In& in, std::size_t m, Stream& left, const Error& error) {
  constexpr std::size_t kMost = Stream::kRoom / sizeof(float);
  for (std::size_t begin = 0; begin < m; begin += kMost) {
    const In from = in.from(begin);
    const std::size_t count = m - begin < kMost ? m - begin : kMost;
    auto* const to = left.room<float>();
    each_group(
        count,
        [&](std::size_t i) {
          from.prefetch(i + m);
          store_group<Number>(to + i, error(from.at(i), begin + i));
        },
        [&](std::size_t i, std::size_t rest) {
          store_part<Number>(to + i, error(from.part(i, rest), begin + i), rest);
        });
    left.written(count * sizeof(float));
  }
}
