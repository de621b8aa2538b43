// Combines operands, which are leaves or nodes, into a node or into the finished root. Schedules
// whose partial results travel need it. Included after reduce.inl, in the same namespace.

// A node as it travels. Its elements are in their own order, whatever order the codec keeps in
// registers, so that ranks with different instruction sets understand each other.
template <class Codec, class = void>
struct Travelling : Plain<typename Codec::Accumulator> {
  using A = typename Codec::Accumulator;
  static Step<A> in_order(Step<A> value) { return value; }
};

// A codec that splits a step into even and odd elements says kInterleaved.
template <class Codec>
struct Travelling<Codec, std::enable_if_t<Codec::kInterleaved>> {
  using A = typename Codec::Accumulator;
  using V = Full<A>;
  using Index = BitsOf<V>;
  static constexpr int kHalf = kLanes<A>;

  static Step<A> load(const A* from) {
    const auto [lower, upper] = Plain<A>::load(from);
    return {shuffle(lower, upper, [](int i) { return 2 * i; }),
            shuffle(lower, upper, [](int i) { return 2 * i + 1; })};
  }
  static void store(A* to, Step<A> value) { Plain<A>::store(to, in_order(value)); }
  static Step<A> in_order(Step<A> value) {
    const auto woven = [](int i) { return i / 2 + (i % 2 ? kHalf : 0); };
    return {shuffle(value.first, value.second, woven),
            shuffle(value.first, value.second, [woven](int i) { return woven(i + kHalf); })};
  }

 private:
  // Lane i is lane from(i) of the two vectors, one behind the other.
  template <class From>
  static V shuffle(V a, V b, From from) {
    Index lanes = {};
    for (int i = 0; i < kHalf; ++i) lanes[i] = static_cast<std::uint32_t>(from(i));
#if defined(__clang__)
    V result = {};
    for (int i = 0; i < kHalf; ++i)
      result[i] = lanes[i] < kHalf ? a[lanes[i]] : b[lanes[i] - kHalf];
    return result;
#else
    return __builtin_shuffle(a, b, lanes);
#endif
  }
};

// One step of the operands' root. `load(operand)` loads one.
template <class Op, class A, class Load>
inline Step<A> evaluate(const std::uint8_t* recipe, int length, const Load& load) {
  Step<A> stack[kMostPending];
  int top = 0;
  int operand = 0;
  for (int k = 0; k < length; ++k) {
    if (recipe[k] == kRecipeTake) {
      stack[top++] = load(operand++);
    } else {
      --top;
      stack[top - 1] = apply<Op>(stack[top - 1], stack[top]);
    }
  }
  return stack[0];
}

// All steps, at i = 0, kStep, ...: `load(operand, i)`, then `put(i, value)`. Two operands are the
// common case, and one is where a root is finished: they need no recipe.
template <class Op, class A, class Load, class Put>
inline void combine_steps_of(const Combination& what, std::size_t whole, const Load& load,
                             const Put& put) {
  if (what.terms == 1) {
    for (std::size_t i = 0; i < whole; i += kStep<A>) put(i, load(0, i));
    return;
  }
  if (what.terms == 2) {
    for (std::size_t i = 0; i < whole; i += kStep<A>) put(i, apply<Op>(load(0, i), load(1, i)));
    return;
  }
  for (std::size_t i = 0; i < whole; i += kStep<A>)
    put(i, evaluate<Op, A>(what.recipe, what.length, [&](int term) { return load(term, i); }));
}

template <class Codec, class Op, bool kAverage>
void combine_ordered(const Combination& what, const Term* terms, void* out, void* copy,
                     std::size_t count) {
  using T = typename Codec::Stored;
  using A = typename Codec::Accumulator;
  using Node = Travelling<Codec>;
  constexpr std::size_t kElements = kStep<A>;
  const std::size_t whole = count / kElements * kElements;
  const auto load = [terms](int term, std::size_t i) {
    return terms[term].is_node ? Node::load(static_cast<const A*>(terms[term].data) + i)
                               : Codec::load(static_cast<const T*>(terms[term].data) + i);
  };
  // The rest behind the last whole step, padded.
  const auto load_rest = [&](int term, std::size_t) {
    if (terms[term].is_node) {
      Padded<Plain<A>> rest;
      rest.read(static_cast<const A*>(terms[term].data) + whole, count - whole);
      return Node::load(rest.elements);
    }
    Padded<Codec> rest;
    rest.read(static_cast<const T*>(terms[term].data) + whole, count - whole);
    return Codec::load(rest.elements);
  };
  if (!what.finish) {
    auto* const to = static_cast<A*>(out);
    auto* const copy_to = static_cast<A*>(copy);
    const auto put = [=](std::size_t i, Step<A> value) {
      Node::store(to + i, value);
      if (copy_to != nullptr) Node::store(copy_to + i, value);
    };
    combine_steps_of<Op, A>(what, whole, load, put);
    if (whole != count)
      combine_steps_of<Op, A>(what, kElements, load_rest,
                              [&](std::size_t, Step<A> value) { put(whole, value); });
    return;
  }
  const bool wide = kAverage && divides_wide<A>(what.divisor);
  const ResultTarget<Codec, std::is_same_v<Op, Sum>> target{
      static_cast<T*>(out), static_cast<T*>(copy), kAverage && !wide ? A(what.divisor) : A(0)};
  const auto finish = [&](const auto& divided) {
    combine_steps_of<Op, A>(what, whole, load,
                            [&](std::size_t i, Step<A> value) { target.put(i, divided(value)); });
    if (whole != count)
      combine_steps_of<Op, A>(what, kElements, load_rest, [&](std::size_t, Step<A> value) {
        target.put_part(whole, count - whole,
                        [&](const auto& part) { part.put(0, divided(value)); });
      });
  };
  if constexpr (kAverage)
    if (wide)
      return finish([&](Step<A> value) {
        A sums[kElements];
        Plain<A>::store(sums, value);
        divide_wide(sums, what.divisor, kElements);
        return Plain<A>::load(sums);
      });
  finish([](Step<A> value) { return value; });
}

// For operations that give the same bits in any order. Their nodes have the leaves' type.
template <class Codec, class Op>
void combine_folded(const Combination& what, const Term* terms, void* out, void* copy,
                    std::size_t count) {
  const void* operands[kFan];
  // More terms than fit are taken in turns, with the result so far as the first of each turn. So a
  // term that lies where the result goes must be the first of all.
  int first = 0;
  for (int term = 1; term < what.terms; ++term)
    if (terms[term].data == out) first = term;
  const auto nth = [&](int i) { return terms[i == 0 ? first : i == first ? 0 : i].data; };
  int taken = what.terms < kFan ? what.terms : kFan;
  for (int i = 0; i < taken; ++i) operands[i] = nth(i);
  reduce_folded<Codec, Op>(operands, taken, what.divisor, out, copy, count);
  while (taken < what.terms) {
    operands[0] = out;
    int more = 1;
    for (; more < kFan && taken < what.terms; ++more, ++taken) operands[more] = nth(taken);
    reduce_folded<Codec, Op>(operands, more, what.divisor, out, copy, count);
  }
}

// Only the root is divided.
template <class T>
void combine_averages(const Combination& what, const Term* terms, void* out, void* copy,
                      std::size_t count) {
  void* const copy_of_sums = what.finish ? nullptr : copy;
  combine_folded<Plain<std::make_unsigned_t<T>>, Sum>(what, terms, out, copy_of_sums, count);
  if (what.finish) divide_sums<T>(out, copy, static_cast<int>(what.divisor), count);
}
