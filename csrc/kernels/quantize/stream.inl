// An output that is written from its first byte to its last. A large one bypasses the caches: its
// lines are not read before they are written, and evict nothing. If it does not begin at a cache
// line, it is written by way of a tile, which holds what does not fill a line yet.
//
// Included after elements.inl, in the same namespace.

#if defined(__AVX512F__)
constexpr bool kStreams = true;
inline void stream_vector(void* to, Floats value) {
  _mm512_stream_ps(static_cast<float*>(to), value);
}
inline void end_of_stream() { _mm_sfence(); }
#elif defined(__AVX2__)
constexpr bool kStreams = true;
inline void stream_vector(void* to, Floats value) {
  _mm256_stream_ps(static_cast<float*>(to), value);
}
inline void end_of_stream() { _mm_sfence(); }
#else
constexpr bool kStreams = false;
inline void stream_vector(void*, Floats) {}
inline void end_of_stream() {}
#endif

// Stores a group of the type past the caches. `to` is the start of a cache line.
template <class Element>
inline void stream_group(typename Element::Stored* to, const Group& group) {
  constexpr int kTogether = sizeof(float) / sizeof(typename Element::Stored);
  if constexpr (kTogether == 1) {
    typename Element::Stored vector[kWidth];
    for (int k = 0; k < kVectors; ++k) {
      Element::store(vector, group.v[k]);
      stream_vector(to + k * kWidth, load_vector<Floats>(vector));
    }
  } else {
    typename Element::Stored narrow[kGroup];
    store_group<Element>(narrow, group);
    for (int i = 0; i < kGroup; i += kTogether * kWidth)
      stream_vector(to + i, load_vector<Floats>(narrow + i));
  }
}

class Stream {
 public:
  static constexpr std::size_t kRoom = 4096;  // bytes

  Stream(void* out, std::size_t bytes) : next_(static_cast<std::byte*>(out)) {
    if (!kStreams || bytes < kLeastStreamed) return;
    before_ = reinterpret_cast<std::uintptr_t>(out) % kLine;
    way_ = before_ == 0 ? kDirect : kTiled;
  }
  ~Stream() {
    if (way_ == kTiled) {
      flush();
      std::memcpy(next_, tile_ + kLine - kept_, kept_);
    }
    if (way_ != kCached) end_of_stream();
  }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  // Where the next bytes are to be written, kRoom at most, before written() says how many; by
  // stream_group() if `direct()`.
  template <class T>
  T* room() {
    return reinterpret_cast<T*>(way_ == kTiled ? tile_ + kLine + used_ : next_);
  }
  bool direct() const { return way_ == kDirect; }
  void written(std::size_t bytes) {
    if (way_ != kTiled) {
      next_ += bytes;
      return;
    }
    used_ += bytes;
    if (used_ >= kRoom) flush();
  }

 private:
  static constexpr std::size_t kLine = 64;
  static constexpr std::size_t kLeastStreamed = std::size_t{1} << 20;
  enum Way { kCached, kDirect, kTiled };

  // Whole lines of the output; the rest is kept.
  void flush() {
    const std::byte* from = tile_ + kLine - kept_;
    std::size_t size = kept_ + used_;
    std::byte* to = next_;
    if (before_ != 0) {
      const std::size_t head = size < kLine - before_ ? size : kLine - before_;
      std::memcpy(to, from, head);
      before_ = (before_ + head) % kLine;
      from += head;
      to += head;
      size -= head;
    }
    for (; size >= kLine; from += kLine, to += kLine, size -= kLine)
      for (std::size_t i = 0; i < kLine; i += sizeof(Floats))
        stream_vector(to + i, load_vector<Floats>(from + i));
    std::memmove(tile_ + kLine - size, from, size);
    kept_ = size;
    used_ = 0;
    next_ = to;
  }

  Way way_ = kCached;
  std::byte* next_;         // of the output
  std::size_t before_ = 0;  // bytes of the next one's line that lie before it, unless tiled already
  // The tile: kept_ bytes up to the first line's end, used_ bytes behind it. So what is written to
  // it begins with a line, as long as whole groups are.
  std::size_t kept_ = 0;
  std::size_t used_ = 0;
  alignas(kLine) std::byte tile_[2 * kRoom + kLine];
};
