// The reduction kernels, written once for every instruction set (see lanes.h for the namespace).
//
// Sums and products of floats follow the contract's order; everything else gives the same bits in
// any order and is folded from the first leaf to the last.
//
// Up to 8 leaves the order is evaluated in registers. More are taken in groups of 8^k consecutive
// leaves, at most 8 groups: each group becomes a node, and the nodes are combined in the same
// order. That is the order: a group starts at a multiple of a power of two and, but for the last,
// is one, so the split of n leaves, the largest power of two below n, is also that of the groups.

struct Sum {
  template <class V>
  static V apply(V a, V b) {
    return a + b;
  }
};

struct Product {
  template <class V>
  static V apply(V a, V b) {
    return a * b;
  }
};

constexpr int split_of(int leaves) {
  int split = 1;
  while (2 * split < leaves) split *= 2;
  return split;
}

constexpr int kFan = 8;
constexpr std::size_t kBlock = 256;  // elements of a node that is kept in the first-level cache

// T[Lo, Hi) of W elements.
template <class From, class Op, int W, int Lo, int Hi>
inline auto tree(const typename From::Stored* const* leaves, std::size_t i) {
  if constexpr (Hi - Lo == 1) {
    return From::template load<W>(leaves[Lo] + i);
  } else {
    constexpr int split = split_of(Hi - Lo);
    return Op::apply(tree<From, Op, W, Lo, Lo + split>(leaves, i),
                     tree<From, Op, W, Lo + split, Hi>(leaves, i));
  }
}

// Where a result goes: to `out`, and to `copy` if there is one; divided first, if it is an average.
template <class T, class A>
struct Target {
  T* out;
  T* copy;
  A divisor;  // 0: do not divide
};

template <class From, class To, class Op, int N>
void combine(const typename From::Stored* const* leaves, std::size_t begin,
             const Target<typename To::Stored, typename From::Accumulator>& target,
             std::size_t count) {
  using A = typename From::Accumulator;
  constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(A));
  const auto put = [&](std::size_t i, auto width) {
    constexpr int W = decltype(width)::value;
    auto value = tree<From, Op, W, 0, N>(leaves, begin + i);
    if (target.divisor != 0) value /= target.divisor;
    To::template store<W>(target.out + i, value);
    if (target.copy != nullptr) To::template store<W>(target.copy + i, value);
  };
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) put(i, std::integral_constant<int, kLanes>{});
  for (; i < count; ++i) put(i, std::integral_constant<int, 1>{});
}

template <class From, class To, class Op>
void combine_few(const typename From::Stored* const* leaves, int n, std::size_t begin,
                 const Target<typename To::Stored, typename From::Accumulator>& target,
                 std::size_t count) {
  switch (n) {
    case 1:
      return combine<From, To, Op, 1>(leaves, begin, target, count);
    case 2:
      return combine<From, To, Op, 2>(leaves, begin, target, count);
    case 3:
      return combine<From, To, Op, 3>(leaves, begin, target, count);
    case 4:
      return combine<From, To, Op, 4>(leaves, begin, target, count);
    case 5:
      return combine<From, To, Op, 5>(leaves, begin, target, count);
    case 6:
      return combine<From, To, Op, 6>(leaves, begin, target, count);
    case 7:
      return combine<From, To, Op, 7>(leaves, begin, target, count);
    default:
      return combine<From, To, Op, 8>(leaves, begin, target, count);
  }
}

// A block of at most kBlock elements of the root of any number of leaves.
template <class From, class To, class Op>
void combine_block(const typename From::Stored* const* leaves, int n, std::size_t begin,
                   const Target<typename To::Stored, typename From::Accumulator>& target,
                   std::size_t count) {
  using A = typename From::Accumulator;
  if (n <= kFan) return combine_few<From, To, Op>(leaves, n, begin, target, count);
  int group = kFan;
  while (group * kFan < n) group *= kFan;
  A nodes[kFan][kBlock];
  const A* pointers[kFan];
  int groups = 0;
  for (int lo = 0; lo < n; lo += group, ++groups) {
    const int size = n - lo < group ? n - lo : group;
    combine_block<From, Node<A>, Op>(leaves + lo, size, begin, {nodes[groups], nullptr, 0}, count);
    pointers[groups] = nodes[groups];
  }
  combine_few<Node<A>, To, Op>(pointers, groups, 0, target, count);
}

template <class Codec, class Op, bool Average>
void reduce_ordered(const void* const* inputs, int n, void* out, void* copy, std::size_t count) {
  using T = typename Codec::Stored;
  using A = typename Codec::Accumulator;
  const auto* leaves = reinterpret_cast<const T* const*>(inputs);
  Target<T, A> target = {static_cast<T*>(out), static_cast<T*>(copy), Average ? A(n) : A(0)};
  if (n <= kFan) return combine_few<Codec, Codec, Op>(leaves, n, 0, target, count);
  for (std::size_t begin = 0; begin < count; begin += kBlock) {
    const std::size_t length = count - begin < kBlock ? count - begin : kBlock;
    Target<T, A> block = target;
    block.out += begin;
    if (copy != nullptr) block.copy += begin;
    combine_block<Codec, Codec, Op>(leaves, n, begin, block, length);
  }
}

// IEEE-754-2019 minimum and maximum: a NaN wins, and -0 is below +0. Equal numbers have equal
// bits but for the sign of zero, which the bitwise operation settles.
struct Minimum {
  template <class V, class Bits>
  static V apply(V a, V b) {
    return (V)(a != a ? (Bits)a : a == b ? (Bits)a | (Bits)b : a < b ? (Bits)a : (Bits)b);
  }
};
struct Maximum {
  template <class V, class Bits>
  static V apply(V a, V b) {
    return (V)(a != a ? (Bits)a : a == b ? (Bits)a & (Bits)b : a > b ? (Bits)a : (Bits)b);
  }
};

template <class Codec, class Op>
void reduce_extreme(const void* const* inputs, int n, void* out, void* copy, std::size_t count) {
  using T = typename Codec::Stored;
  using A = typename Codec::Accumulator;
  using Word = std::conditional_t<sizeof(A) == 4, std::uint32_t, std::uint64_t>;
  constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(A));
  const auto* leaves = reinterpret_cast<const T* const*>(inputs);
  const auto put = [&](std::size_t i, auto width) {
    constexpr int W = decltype(width)::value;
    Vector<A, W> value = Codec::template load<W>(leaves[0] + i);
    for (int leaf = 1; leaf < n; ++leaf)
      value = Op::template apply<Vector<A, W>, Vector<Word, W>>(
          value, Codec::template load<W>(leaves[leaf] + i));
    Codec::template store<W>(static_cast<T*>(out) + i, value);
    if (copy != nullptr) Codec::template store<W>(static_cast<T*>(copy) + i, value);
  };
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) put(i, std::integral_constant<int, kLanes>{});
  for (; i < count; ++i) put(i, std::integral_constant<int, 1>{});
}

struct And {
  template <class V>
  static V apply(V a, V b) {
    return a & b;
  }
};
struct Or {
  template <class V>
  static V apply(V a, V b) {
    return a | b;
  }
};
struct Xor {
  template <class V>
  static V apply(V a, V b) {
    return a ^ b;
  }
};
struct Least {
  template <class V>
  static V apply(V a, V b) {
    return a < b ? a : b;
  }
};
struct Greatest {
  template <class V>
  static V apply(V a, V b) {
    return a > b ? a : b;
  }
};

// Integers: T is unsigned where the operation wraps or is bitwise.
template <class T, class Op>
void reduce_integers(const void* const* inputs, int n, void* out, void* copy, std::size_t count) {
  constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(T));
  const auto* leaves = reinterpret_cast<const T* const*>(inputs);
  const auto put = [&](std::size_t i, auto width) {
    using V = Vector<T, decltype(width)::value>;
    V value = load_vector<V>(leaves[0] + i);
    for (int leaf = 1; leaf < n; ++leaf) value = Op::apply(value, load_vector<V>(leaves[leaf] + i));
    store_vector(static_cast<T*>(out) + i, value);
    if (copy != nullptr) store_vector(static_cast<T*>(copy) + i, value);
  };
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) put(i, std::integral_constant<int, kLanes>{});
  for (; i < count; ++i) put(i, std::integral_constant<int, 1>{});
}

template <class Codec>
ReduceFn find_float(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return reduce_ordered<Codec, Sum, false>;
    case ReduceOp::kAvg:
      return reduce_ordered<Codec, Sum, true>;
    case ReduceOp::kProd:
      return reduce_ordered<Codec, Product, false>;
    case ReduceOp::kMin:
      return reduce_extreme<Codec, Minimum>;
    case ReduceOp::kMax:
      return reduce_extreme<Codec, Maximum>;
    default:
      return nullptr;
  }
}

template <class T>
ReduceFn find_integer(ReduceOp op) {
  using U = std::make_unsigned_t<T>;
  switch (op) {
    case ReduceOp::kSum:
      return reduce_integers<U, Sum>;
    case ReduceOp::kProd:
      return reduce_integers<U, Product>;
    case ReduceOp::kMin:
      return reduce_integers<T, Least>;
    case ReduceOp::kMax:
      return reduce_integers<T, Greatest>;
    case ReduceOp::kBand:
      return reduce_integers<U, And>;
    case ReduceOp::kBor:
      return reduce_integers<U, Or>;
    case ReduceOp::kBxor:
      return reduce_integers<U, Xor>;
    default:
      return nullptr;
  }
}

ReduceFn find(Dtype dtype, ReduceOp op) {
  switch (dtype) {
    case Dtype::kFloat16:
      return find_float<Float16>(op);
    case Dtype::kBFloat16:
      return find_float<BFloat16>(op);
    case Dtype::kFloat32:
      return find_float<Float32>(op);
    case Dtype::kFloat64:
      return find_float<Float64>(op);
    case Dtype::kInt8:
      return find_integer<std::int8_t>(op);
    case Dtype::kInt16:
      return find_integer<std::int16_t>(op);
    case Dtype::kInt32:
      return find_integer<std::int32_t>(op);
    case Dtype::kInt64:
      return find_integer<std::int64_t>(op);
    case Dtype::kUInt8:
    case Dtype::kBool:  // 0 and 1: the least is their and, the greatest their or
      return find_integer<std::uint8_t>(op);
  }
  return nullptr;
}
