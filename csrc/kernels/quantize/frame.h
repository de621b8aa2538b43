// An array chunk by chunk: the same for all codecs.
//
// A codec is a class with encode(), which writes one chunk's record and what it leaves, and Leaf,
// which reads one.

template <class Codec, class Element, bool kHeld>
bool quantize_chunks(const Input<Element, kHeld>& in, float* left, std::size_t count,
                     std::size_t chunk, std::byte* payload) {
  Stream errors(left, count * sizeof(float));
  for (std::size_t begin = 0; begin < count; begin += chunk) {
    const std::size_t m = count - begin < chunk ? count - begin : chunk;
    if (!Codec::encode(in.from(begin), m, payload, errors)) return false;
    payload += record_bytes(Codec::kCodec, m);
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

// --- Sums of payloads, in the contract's order. Four rows at a time are added in registers; the
// nodes of such fours wait in a block each for the nodes beside them.

constexpr std::size_t kFour = 4;
constexpr std::size_t kSumBlock = 512;  // elements of a node
constexpr int kNodes = 16;              // that wait: one for each size
static_assert(kMaxRanks <= static_cast<int>(kFour) << (kNodes - 2));

struct Node {
  float v[kSumBlock];
};

// T over some chunks of as many rows.
template <class Leaf>
struct Four {
  Leaf leaves[kFour];
  std::size_t rows;

  Four(const std::byte* record, std::size_t rows, std::size_t stride)
      : leaves{Leaf(record), Leaf(rows > 1 ? record + stride : record),
               Leaf(rows > 2 ? record + 2 * stride : record),
               Leaf(rows > 3 ? record + 3 * stride : record)},
        rows(rows) {}

  // put(i, group) for each whole group of elements begin to begin + count - 1, then put_part(i,
  // group, rest).
  template <class Put, class PutPart>
  void each(std::size_t begin, std::size_t count, const Put& put, const PutPart& put_part) const {
    switch (rows) {
      case 1:
        return each_of<1>(begin, count, put, put_part);
      case 2:
        return each_of<2>(begin, count, put, put_part);
      case 3:
        return each_of<3>(begin, count, put, put_part);
      default:
        return each_of<4>(begin, count, put, put_part);
    }
  }

 private:
  template <int kRows, class Read>
  static Group sum(const Read& read) {
    if constexpr (kRows == 1)
      return read(0);
    else if constexpr (kRows == 2)
      return read(0) + read(1);
    else if constexpr (kRows == 3)
      return (read(0) + read(1)) + read(2);
    else
      return (read(0) + read(1)) + (read(2) + read(3));
  }
  template <int kRows, class Put, class PutPart>
  void each_of(std::size_t begin, std::size_t count, const Put& put,
               const PutPart& put_part) const {
    const Four own = *this;  // which no store can change
    each_group(
        count,
        [&](std::size_t i) {
          put(i, sum<kRows>([&](int row) { return own.leaves[row].at(begin + i); }));
        },
        [&](std::size_t i, std::size_t rest) {
          const auto read = [&](int row) { return own.leaves[row].part(begin + i, rest); };
          put_part(i, sum<kRows>(read), rest);
        });
  }
};

inline void add_node(Node& to, const Node& more) {
  for (std::size_t i = 0; i < kSumBlock; i += kGroup)
    store_group<Number>(to.v + i, load_group<Number>(to.v + i) + load_group<Number>(more.v + i));
}

// The same of more than four rows, from one node to wait to the root.
template <class Leaf, class Put, class PutPart>
void sum_many(const std::byte* record, std::size_t rows, std::size_t stride, std::size_t begin,
              std::size_t count, const Put& put, const PutPart& put_part) {
  Node waiting[kNodes];
  int top = 0;
  std::size_t taken = 0;
  while (taken < rows) {
    const std::size_t more = rows - taken < kFour ? rows - taken : kFour;
    Node& node = waiting[top++];
    Four<Leaf>(record + taken * stride, more, stride)
        .each(
            begin, count,
            [&](std::size_t i, const Group& group) { store_group<Number>(node.v + i, group); },
            [&](std::size_t i, const Group& group, std::size_t) {
              store_group<Number>(node.v + i, group);
            });
    taken += more;
    // Two of a size are one of the next; at the end all that wait are the right edge.
    for (std::size_t done = taken / kFour; done % 2 == 0 && more == kFour; done /= 2, --top)
      add_node(waiting[top - 2], waiting[top - 1]);
  }
  for (; top > 1; --top) add_node(waiting[top - 2], waiting[top - 1]);
  each_group(
      count, [&](std::size_t i) { put(i, load_group<Number>(waiting[0].v + i)); },
      [&](std::size_t i, std::size_t rest) {
        put_part(i, load_group<Number>(waiting[0].v + i), rest);
      });
}

template <class Codec, class Element, bool kDivide>
void dequantize_chunks(const std::byte* record, std::size_t rows, std::size_t stride,
                       std::size_t chunk, void* out, std::size_t count, float divisor) {
  using Leaf = typename Codec::Leaf;
  using T = typename Element::Stored;
  static_assert(kSumBlock * sizeof(T) <= Stream::kRoom);
  Stream results(out, count * sizeof(T));
  const auto finished = [divisor](const Group& sum) {
    return kDivide ? group_of([&](int k) { return sum.v[k] / divisor; }) : sum;
  };
  for (std::size_t first = 0; first < count; first += chunk) {
    const std::size_t m = count - first < chunk ? count - first : chunk;
    for (std::size_t begin = 0; begin < m; begin += kSumBlock) {
      const std::size_t here = m - begin < kSumBlock ? m - begin : kSumBlock;
      auto* const to = results.room<T>();
      const auto put = [&](std::size_t i, const Group& sum) {
        store_group<Element>(to + i, finished(sum));
      };
      const auto put_part = [&](std::size_t i, const Group& sum, std::size_t rest) {
        store_part<Element>(to + i, finished(sum), rest);
      };
      if (rows <= kFour)
        Four<Leaf>(record, rows, stride).each(begin, here, put, put_part);
      else
        sum_many<Leaf>(record, rows, stride, begin, here, put, put_part);
      results.written(here * sizeof(T));
    }
    record += record_bytes(Codec::kCodec, m);
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
Quantizing find_element(Dtype dtype) {
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

Quantizing find(QuantizeCodec codec, Dtype dtype) {
  return codec == QuantizeCodec::kOneBit ? find_element<OneBit>(dtype) : find_element<Int8>(dtype);
}
