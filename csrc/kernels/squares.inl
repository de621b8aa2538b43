// Sums of squares. Included after lanes.inl, in the same namespace.
//
//   row    its elements are widened to fp64 and squared; element j is added to lane j % 8, and the
//          lanes are joined in the contract's order
//   array  its rows are joined in the contract's order
//
// A lane starts from +0, which changes no square.

constexpr std::size_t kSquareLanes = 8;

// Of kSquareLanes elements.
template <Dtype kType>
inline void square(const typename CodecOf<kType>::Stored* from, double* squares) {
  const auto each = [squares](auto element_at) {
    for (std::size_t lane = 0; lane < kSquareLanes; ++lane) {
      const double element = element_at(lane);
      squares[lane] = element * element;
    }
  };
  if constexpr (size_of(kType) >= sizeof(float)) return each([&](auto lane) { return from[lane]; });
#if defined(__F16C__)
  // Compilers make half as much of the formula's bf16, and a fifth of its fp16.
  if constexpr (size_of(kType) == 2) {
    const auto stored = load_vector<__m128i>(from);
    float elements[kSquareLanes];
    if constexpr (kType == Dtype::kFloat16)
      store_vector(elements, _mm256_cvtph_ps(stored));
    else
      store_vector(elements, _mm256_slli_epi32(_mm256_cvtepu16_epi32(stored), 16));
    return each([&](auto lane) { return elements[lane]; });
  }
#endif
  if constexpr (size_of(kType) < sizeof(float))
    each([&](auto lane) { return float_from<kType, float>(std::uint32_t{from[lane]}); });
}

// Joins neighbours until one is left, which is T[0, n): blocks of two, four, ... are its nodes. Not
// inlined, or GCC 12 adds lane 0 of a row up twice, in a vector and by itself.
__attribute__((noinline)) double join_neighbours(double* sums, std::size_t n) {
  for (; n > 1; n = (n + 1) / 2) {
    for (std::size_t i = 0; i < n / 2; ++i) sums[i] = sums[2 * i] + sums[2 * i + 1];
    if (n % 2 != 0) sums[n / 2] = sums[n - 1];
  }
  return sums[0];
}

template <Dtype kType>
double square_row(const typename CodecOf<kType>::Stored* row, std::size_t length) {
  double lanes[kSquareLanes] = {}, squares[kSquareLanes];
  const auto add = [&] {
    for (std::size_t lane = 0; lane < kSquareLanes; ++lane) lanes[lane] += squares[lane];
  };
  std::size_t i = 0;
  for (; i + kSquareLanes <= length; i += kSquareLanes) {
    square<kType>(row + i, squares);
    add();
  }
  if (i != length) {
    typename CodecOf<kType>::Stored padded[kSquareLanes] = {};
    __builtin_memcpy(padded, row + i, (length - i) * sizeof(padded[0]));
    square<kType>(padded, squares);
    add();
  }
  return join_neighbours(lanes, kSquareLanes);
}

// Of so many rows, at most; what they are beside each other is a node of the order.
constexpr std::size_t kRowsAtOnce = 256;

template <Dtype kType>
double sum_squares(const void* data, std::size_t rows, std::size_t length) {
  const auto* const from = static_cast<const typename CodecOf<kType>::Stored*>(data);
  if (rows > kRowsAtOnce) {
    std::size_t left = kRowsAtOnce;
    while (2 * left < rows) left *= 2;
    const double sum = sum_squares<kType>(from, left, length);
    return sum + sum_squares<kType>(from + left * length, rows - left, length);
  }
  double sums[kRowsAtOnce] = {};
  std::size_t row = 0;
  if (length == 1) {  // as a bias has: a row is its element's square
    for (; row + kSquareLanes <= rows; row += kSquareLanes) square<kType>(from + row, sums + row);
  }
  for (; row < rows; ++row) sums[row] = square_row<kType>(from + row * length, length);
  return join_neighbours(sums, rows);
}
