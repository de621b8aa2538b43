// The reduction kernels, written once for every instruction set. Included after lanes.inl.
//
// Sums and products of floats follow the contract's order; everything else gives the same bits in
// any order and is folded from the first leaf to the last.
//
// Up to 8 leaves are combined in registers. More are taken in at most 8 groups of 8^k consecutive
// leaves. Each group becomes a node, and the nodes are combined in the same order. That is the
// contract's order: it splits n leaves at the largest power of two below n, and so do the groups,
// because each but the last has a power of two of leaves.

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
struct Minimum {
  template <class V>
  static V apply(V a, V b) {
    return minimum<BitsOf<V>>(a, b);
  }
};
struct Maximum {
  template <class V>
  static V apply(V a, V b) {
    return maximum<BitsOf<V>>(a, b);
  }
};

template <class Op, class V>
inline Pair<V> apply(Pair<V> a, Pair<V> b) {
  return {Op::apply(a.first, b.first), Op::apply(a.second, b.second)};
}

constexpr int split_of(int leaves) {
  int split = 1;
  while (2 * split < leaves) split *= 2;
  return split;
}

constexpr int kFan = 8;
constexpr std::size_t kBlock = 256;  // elements of a node that is kept in the first-level cache
static_assert(kBlock % kStep<float> == 0);

// A node of the order, in a buffer of whole steps.
template <class A>
struct Node : Plain<A> {};

// A step of T[Lo, Hi) at i.
template <class From, class Op, int Lo, int Hi, int N>
inline auto tree(const typename From::Stored* const (&leaves)[N], std::size_t i) {
  if constexpr (Hi - Lo == 1) {
    return From::load(leaves[Lo] + i);
  } else {
    constexpr int split = split_of(Hi - Lo);
    return apply<Op>(tree<From, Op, Lo, Lo + split>(leaves, i),
                     tree<From, Op, Lo + split, Hi>(leaves, i));
  }
}

// A node that receives values, unfinished.
template <class A>
struct NodeTarget {
  A* out;
  void put(std::size_t i, Step<A> value) const { Node<A>::store(out + i, value); }
  template <class Run>
  void put_part(std::size_t i, std::size_t, const Run& run) const {
    run(NodeTarget{out + i});
  }
};

// Where A does not hold the divisor, a sum is divided in fp64, and the quotient rounded. That gives
// the bits of a division in fp32 where fp32 does (53 bits are at least 2 * 24 + 2), so only
// the others take the time. Not in ResultTarget: a call there would cost every average registers.
template <class A>
bool divides_wide(double divisor) {
  return static_cast<A>(divisor) != divisor;
}

template <class A>
[[gnu::noinline]] void divide_wide(A* sums, double divisor, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) sums[i] = static_cast<A>(double{sums[i]} / divisor);
}

// The result that receives values, and `copy` if there is one. Averages are divided first.
template <class Codec, bool kMayDivide>
struct ResultTarget {
  using T = typename Codec::Stored;
  using A = typename Codec::Accumulator;
  T* out;
  T* copy;
  A divisor;  // 0: do not divide
  // Always inline: the rounding of narrow floats is long, and so its constants stay in registers.
  [[gnu::always_inline]] void put(std::size_t i, Step<A> value) const {
    if (kMayDivide && divisor != 0) value = {value.first / divisor, value.second / divisor};
    Codec::store(out + i, value);
    if (copy != nullptr) Codec::store(copy + i, value);
  }
  template <class Run>
  void put_part(std::size_t i, std::size_t count, const Run& run) const {
    Padded<Codec> result;
    run(ResultTarget{result.elements, nullptr, divisor});
    result.write(out + i, count);
    if (copy != nullptr) result.write(copy + i, count);
  }
};

// A step of narrow floats takes so many instructions that a core has too few loads under way by
// itself, where lines come from another core's cache. So each step prefetches a line of each leaf.
template <class Codec>
[[gnu::always_inline]] inline void prefetch(const typename Codec::Stored* const* leaves, int n,
                                            std::size_t i, std::size_t count) {
  using T = typename Codec::Stored;
  if (std::is_same_v<T, typename Codec::Accumulator>) return;
  constexpr std::size_t kAhead = 1024 / sizeof(T);
  const std::size_t at = i + kAhead < count ? i + kAhead : count - 1;
  for (int leaf = 0; leaf < n; ++leaf) __builtin_prefetch(leaves[leaf] + at);
}

// `count` is a multiple of a step.
template <class From, class Op, int N, class Target>
void combine(const typename From::Stored* const* leaves, std::size_t begin, Target target,
             std::size_t count) {
  // Pointers of our own, which no store can change: they stay in registers.
  const typename From::Stored* own[N];
  for (int leaf = 0; leaf < N; ++leaf) own[leaf] = leaves[leaf] + begin;
  for (std::size_t i = 0; i < count; i += kStep<typename From::Accumulator>) {
    prefetch<From>(own, N, i, count);
    target.put(i, tree<From, Op, 0, N>(own, i));
  }
}

template <class From, class Op, class Target>
void combine_steps(const typename From::Stored* const* leaves, int n, std::size_t begin,
                   const Target& target, std::size_t count) {
  switch (n) {
    case 1:
      return combine<From, Op, 1>(leaves, begin, target, count);
    case 2:
      return combine<From, Op, 2>(leaves, begin, target, count);
    case 3:
      return combine<From, Op, 3>(leaves, begin, target, count);
    case 4:
      return combine<From, Op, 4>(leaves, begin, target, count);
    case 5:
      return combine<From, Op, 5>(leaves, begin, target, count);
    case 6:
      return combine<From, Op, 6>(leaves, begin, target, count);
    case 7:
      return combine<From, Op, 7>(leaves, begin, target, count);
    default:
      return combine<From, Op, 8>(leaves, begin, target, count);
  }
}

// Up to 8 leaves.
template <class From, class Op, class Target>
void combine_few(const typename From::Stored* const* leaves, int n, std::size_t begin,
                 const Target& target, std::size_t count) {
  constexpr std::size_t kElements = kStep<typename From::Accumulator>;
  const std::size_t whole = count / kElements * kElements;
  combine_steps<From, Op>(leaves, n, begin, target, whole);
  if (whole == count) return;
  Padded<From> parts[kFan];
  const typename From::Stored* pointers[kFan];
  constexpr bool kNode = std::is_same_v<From, Node<typename From::Accumulator>>;
  for (int leaf = 0; leaf < n; ++leaf) {
    parts[leaf].read(leaves[leaf] + begin + whole, kNode ? kElements : count - whole);
    pointers[leaf] = parts[leaf].elements;
  }
  target.put_part(whole, count - whole, [&](const Target& part) {
    combine_steps<From, Op>(pointers, n, 0, part, kElements);
  });
}

// The root of any number of leaves, of a block of at most kBlock elements.
template <class From, class Op, class Target>
void combine_block(const typename From::Stored* const* leaves, int n, std::size_t begin,
                   const Target& target, std::size_t count) {
  using A = typename From::Accumulator;
  if (n <= kFan) return combine_few<From, Op>(leaves, n, begin, target, count);
  int group = kFan;
  while (group * kFan < n) group *= kFan;
  A nodes[kFan][kBlock];
  const A* pointers[kFan] = {};
  int groups = 0;
  for (int lo = 0; lo < n; lo += group, ++groups) {
    const int size = n - lo < group ? n - lo : group;
    combine_block<From, Op>(leaves + lo, size, begin, NodeTarget<A>{nodes[groups]}, count);
    pointers[groups] = nodes[groups];
  }
  combine_few<Node<A>, Op>(pointers, groups, 0, target, count);
}

template <class Codec, class Op, bool kAverage>
void reduce_ordered(const void* const* inputs, int n, double divisor, void* out, void* copy,
                    std::size_t count) {
  using T = typename Codec::Stored;
  using A = typename Codec::Accumulator;
  const auto* leaves = reinterpret_cast<const T* const*>(inputs);
  auto* const to = static_cast<T*>(out);
  auto* const copy_to = static_cast<T*>(copy);
  const bool wide = kAverage && divides_wide<A>(divisor);
  const auto target = [&](std::size_t begin) {
    return ResultTarget<Codec, std::is_same_v<Op, Sum>>{
        to + begin, copy_to == nullptr ? nullptr : copy_to + begin,
        kAverage && !wide ? A(divisor) : A(0)};
  };
  if (n <= kFan && !wide) return combine_few<Codec, Op>(leaves, n, 0, target(0), count);
  for (std::size_t begin = 0; begin < count; begin += kBlock) {
    const std::size_t some = count - begin < kBlock ? count - begin : kBlock;
    if (!wide) {
      combine_block<Codec, Op>(leaves, n, begin, target(begin), some);
      continue;
    }
    A sums[kBlock];
    const A* const divided = sums;
    combine_block<Codec, Op>(leaves, n, begin, NodeTarget<A>{sums}, some);
    divide_wide(sums, divisor, (some + kStep<A> - 1) / kStep<A> * kStep<A>);
    combine_few<Node<A>, Op>(&divided, 1, 0, target(begin), some);
  }
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

// For operations that give the same bits in any order: minimum and maximum, and all of integers. T
// is unsigned where the operation wraps or is bitwise.
template <class Codec, class Op>
void reduce_folded(const void* const* inputs, int n, double, void* out, void* copy,
                   std::size_t count) {
  using T = typename Codec::Stored;
  constexpr std::size_t kElements = Padded<Codec>::kElements;
  const auto* leaves = reinterpret_cast<const T* const*>(inputs);
  auto* const to = static_cast<T*>(out);
  auto* const copy_to = static_cast<T*>(copy);
  std::size_t i = 0;
  for (; i + kElements <= count; i += kElements) {
    prefetch<Codec>(leaves, n, i, count);
    auto value = Codec::load(leaves[0] + i);
    for (int leaf = 1; leaf < n; ++leaf) value = apply<Op>(value, Codec::load(leaves[leaf] + i));
    Codec::store(to + i, value);
    if (copy_to != nullptr) Codec::store(copy_to + i, value);
  }
  if (i == count) return;
  Padded<Codec> part;
  part.read(leaves[0] + i, count - i);
  auto value = Codec::load(part.elements);
  for (int leaf = 1; leaf < n; ++leaf) {
    part.read(leaves[leaf] + i, count - i);
    value = apply<Op>(value, Codec::load(part.elements));
  }
  Codec::store(part.elements, value);
  part.write(to + i, count - i);
  if (copy_to != nullptr) part.write(copy_to + i, count - i);
}

// Turns the sums of integers in `out` into averages, there and in `copy`.
template <class T>
void divide_sums(void* out, void* copy, int n, std::size_t count) {
  using U = std::make_unsigned_t<T>;
  auto* const to = static_cast<std::byte*>(out);
  auto* const copy_to = static_cast<std::byte*>(copy);
  for (std::size_t at = 0; at < count * sizeof(T); at += sizeof(T)) {
    U value;
    __builtin_memcpy(&value, to + at, sizeof(value));
    value = average_of<T>(value, n);
    __builtin_memcpy(to + at, &value, sizeof(value));
    if (copy_to != nullptr) __builtin_memcpy(copy_to + at, &value, sizeof(value));
  }
}

template <class T>
void reduce_averages(const void* const* inputs, int n, double divisor, void* out, void* copy,
                     std::size_t count) {
  reduce_folded<Plain<std::make_unsigned_t<T>>, Sum>(inputs, n, divisor, out, nullptr, count);
  divide_sums<T>(out, copy, static_cast<int>(divisor), count);
}
