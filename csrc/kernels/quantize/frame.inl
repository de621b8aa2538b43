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

// Goes through an array chunk by chunk, for any codec.
//
// A codec is a class with the name kName. scan() reads a chunk once, and what it finds is an object
// of the class. Its error() then gives what is left of each group. Both write into the chunk's
// record, which has record_bytes(). Leaf reads a record.

// Writes the errors of `count` elements from element `begin` of a chunk on. Prefetches later
// elements: these here are in the cache already.
template <class Codec, bool kDirect, class In>
inline void put_errors(const Codec& codec, const In& in, std::byte* record, std::size_t begin,
                       std::size_t count, std::size_t later, float* left) {
  const Codec own = codec;  // which no store can change
  each_group(
      count,
      [&](std::size_t i) {
        in.prefetch(begin + i + later);
        const Group error = own.error(in.at(begin + i), record, begin + i, kGroup);
        if constexpr (kDirect)
          stream_group<Number>(left + i, error);
        else
          store_group<Number>(left + i, error);
      },
      [&](std::size_t i, std::size_t rest) {
        const Group c = in.part(begin + i, rest);
        store_part<Number>(left + i, own.error(c, record, begin + i, rest), rest);
      });
}

// Several short chunks are scanned before the first one's errors are written, so that these need
// not wait for its scale. So many elements:
constexpr std::size_t kScanned = 1024;

template <class Codec, class Element, bool kHeld>
bool quantize_chunks(const Input<Element, kHeld>& in, float* left, std::size_t count,
                     std::size_t chunk, std::byte* payload) {
  constexpr std::size_t kMost = Stream::kRoom / sizeof(float);
  Stream errors(left, count * sizeof(float));
  Codec found[kScanned / kLeastChunk];
  const std::size_t batch = chunk < kScanned ? kScanned / chunk * chunk : chunk;
  const std::size_t record_size = Codec::record_bytes(chunk);
  for (std::size_t first = 0; first < count; first += batch) {
    const Input<Element, kHeld> here = in.from(first);
    const std::size_t size = count - first < batch ? count - first : batch;
    const auto each_chunk = [&](const auto& visit) {
      std::byte* record = payload;
      Codec* codec = found;
      for (std::size_t at = 0; at < size; at += chunk, record += record_size, ++codec)
        if (!visit(here.from(at), size - at < chunk ? size - at : chunk, record, *codec))
          return false;
      return true;
    };
    const bool finite = each_chunk(Codec::template scan<Input<Element, kHeld>>);
    if (!finite) return false;
    each_chunk([&](const Input<Element, kHeld>& own, std::size_t m, std::byte* record,
                   const Codec& codec) {
      for (std::size_t begin = 0; begin < m; begin += kMost) {
        const std::size_t some = m - begin < kMost ? m - begin : kMost;
        auto* const to = errors.room<float>();
        if (errors.direct())
          put_errors<Codec, true>(codec, own, record, begin, some, batch, to);
        else
          put_errors<Codec, false>(codec, own, record, begin, some, batch, to);
        errors.written(some * sizeof(float));
      }
      return true;
    });
    payload += batch / chunk * record_size;
  }
  return true;
}

template <class Codec, class Element>
bool quantize(const void* x, const float* held, float* left, std::size_t count, std::size_t chunk,
              std::byte* payload) {
  const auto* from = static_cast<const typename Element::Stored*>(x);
  if (held == nullptr)
    return quantize_chunks<Codec>(Input<Element, false>{from, nullptr}, left, count, chunk,
                                  payload);
  return quantize_chunks<Codec>(Input<Element, true>{from, held}, left, count, chunk, payload);
}

// --- Sums of payloads, in the contract's order, a block at a time.

constexpr std::size_t kSumBlock = 512;  // elements
struct Node {
  float v[kSumBlock];
};

// Four rows at a time are added in registers. Their nodes wait for the nodes beside them.
constexpr std::size_t kFour = 4;
constexpr int kWaiting = 16;  // one of each size
static_assert(kCountableRanks <= static_cast<int>(kFour) << (kWaiting - 2));

template <int kRows, class Read>
inline Group sum_of(const Read& read) {
  if constexpr (kRows == 1)
    return read(0);
  else if constexpr (kRows == 2)
    return read(0) + read(1);
  else if constexpr (kRows == 3)
    return (read(0) + read(1)) + read(2);
  else
    return (read(0) + read(1)) + (read(2) + read(3));
}

// The node of one to four rows, for elements begin to begin + count - 1 of a chunk.
template <class Leaf, int kRows>
void sum_few(const std::byte* record, std::size_t stride, std::size_t begin, std::size_t count,
             Node& node) {
  const auto row = [&](int i) { return Leaf(record + static_cast<std::size_t>(i) * stride); };
  const Leaf leaves[] = {row(0), row(kRows > 1 ? 1 : 0), row(kRows > 2 ? 2 : 0),
                         row(kRows > 3 ? 3 : 0)};
  each_group(
      count,
      [&](std::size_t i) {
        store_group<Number>(node.v + i,
                            sum_of<kRows>([&](int row) { return leaves[row].at(begin + i); }));
      },
      [&](std::size_t i, std::size_t rest) {
        store_group<Number>(
            node.v + i, sum_of<kRows>([&](int row) { return leaves[row].part(begin + i, rest); }));
      });
}

inline void add_node(Node& to, const Node& more) {
  for (std::size_t i = 0; i < kSumBlock; i += kGroup)
    store_group<Number>(to.v + i, load_group<Number>(to.v + i) + load_group<Number>(more.v + i));
}

// The node of any number of rows, into waiting[0].
template <class Leaf>
void sum_rows(const std::byte* record, std::size_t rows, std::size_t stride, std::size_t begin,
              std::size_t count, Node (&waiting)[kWaiting]) {
  int top = 0;
  for (std::size_t taken = 0; taken < rows; taken += kFour) {
    Node& node = waiting[top++];
    const std::byte* const first = record + taken * stride;
    switch (rows - taken) {
      case 1:
        sum_few<Leaf, 1>(first, stride, begin, count, node);
        break;
      case 2:
        sum_few<Leaf, 2>(first, stride, begin, count, node);
        break;
      case 3:
        sum_few<Leaf, 3>(first, stride, begin, count, node);
        break;
      default:
        sum_few<Leaf, 4>(first, stride, begin, count, node);
        // Two of a size are one of the next.
        for (std::size_t fours = taken / kFour; fours % 2 != 0; fours /= 2, --top)
          add_node(waiting[top - 2], waiting[top - 1]);
    }
  }
  for (; top > 1; --top) add_node(waiting[top - 2], waiting[top - 1]);  // the right edge
}

// The elements of a block in their type, from what `read` and `read_part` give.
template <class Element, bool kDirect, class Read, class ReadPart, class Finish>
inline void put_results(std::size_t count, typename Element::Stored* out, const Read& read,
                        const ReadPart& read_part, const Finish& finished) {
  each_group(
      count,
      [&](std::size_t i) {
        const Group result = finished(read(i));
        if constexpr (kDirect)
          stream_group<Element>(out + i, result);
        else
          store_group<Element>(out + i, result);
      },
      [&](std::size_t i, std::size_t rest) {
        store_part<Element>(out + i, finished(read_part(i, rest)), rest);
      });
}

template <class Codec, class Element, bool kDivide>
void dequantize_chunks(const std::byte* record, std::size_t rows, std::size_t stride,
                       std::size_t chunk, void* out, std::size_t count, float divisor) {
  using Leaf = typename Codec::Leaf;
  using T = typename Element::Stored;
  static_assert(kSumBlock * sizeof(T) <= Stream::kRoom);
  Stream results(out, count * sizeof(T));
  Node waiting[kWaiting];
  const auto finished = [divisor](const Group& sum) {
    return kDivide ? group_of([&](int k) { return sum.v[k] / divisor; }) : sum;
  };
  for (std::size_t first = 0; first < count; first += chunk) {
    const std::size_t m = count - first < chunk ? count - first : chunk;
    const Leaf only(record);
    for (std::size_t begin = 0; begin < m; begin += kSumBlock) {
      const std::size_t here = m - begin < kSumBlock ? m - begin : kSumBlock;
      auto* const to = results.room<T>();
      const auto put = [&](const auto& read, const auto& read_part) {
        if (results.direct())
          put_results<Element, true>(here, to, read, read_part, finished);
        else
          put_results<Element, false>(here, to, read, read_part, finished);
      };
      if (rows == 1) {
        put([&](std::size_t i) { return only.at(begin + i); },
            [&](std::size_t i, std::size_t rest) { return only.part(begin + i, rest); });
      } else {
        sum_rows<Leaf>(record, rows, stride, begin, here, waiting);
        const auto root = [&](std::size_t i) { return load_group<Number>(waiting[0].v + i); };
        put(root, [&](std::size_t i, std::size_t) { return root(i); });
      }
      results.written(here * sizeof(T));
    }
    record += Codec::record_bytes(m);
  }
}

template <class Codec, class Element>
void dequantize(const std::byte* payloads, std::size_t rows, std::size_t stride, std::size_t chunk,
                void* out, std::size_t count, float divisor) {
  if (divisor == 1)
    dequantize_chunks<Codec, Element, false>(payloads, rows, stride, chunk, out, count, divisor);
  else
    dequantize_chunks<Codec, Element, true>(payloads, rows, stride, chunk, out, count, divisor);
}

template <class Codec>
Quantizing find(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat16:
      return {quantize<Codec, Fp16>, dequantize<Codec, Fp16>};
    case Dtype::kBFloat16:
      return {quantize<Codec, Bf16>, dequantize<Codec, Bf16>};
    case Dtype::kFloat32:
      return {quantize<Codec, Fp32>, dequantize<Codec, Fp32>};
    default:
      return {};
  }
}

template <class Codec>
constexpr QuantizeCodec row_of() {
  return {Codec::kName, Codec::record_bytes, find<Codec>};
}
