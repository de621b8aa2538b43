// Sums of sparse vectors in the contract's order, and their scattering into dense arrays.

struct Entries {
  const std::uint32_t* indices;
  const float* values;
  std::size_t count;
};

// The entries of both; where both have one, a + b. The outputs have room for all.
inline Entries merge(const Entries& a, const Entries& b, std::uint32_t* indices, float* values) {
  std::size_t i = 0, j = 0, n = 0;
  while (i < a.count && j < b.count) {
    const std::uint32_t at_a = a.indices[i], at_b = b.indices[j];
    const float of_a = a.values[i], of_b = b.values[j];
    indices[n] = at_a < at_b ? at_a : at_b;
    values[n++] = at_a == at_b ? of_a + of_b : at_a < at_b ? of_a : of_b;
    i += at_a <= at_b;
    j += at_b <= at_a;
  }
  const auto rest = [&](const Entries& from, std::size_t at) {
    const std::size_t more = from.count - at;
    if (more == 0) return;
    std::memcpy(indices + n, from.indices + at, more * sizeof(*indices));
    std::memcpy(values + n, from.values + at, more * sizeof(*values));
    n += more;
  };
  rest(a, i);
  rest(b, j);
  return {indices, values, n};
}

// A buffer with room for all entries. There are two: a node is made in one of them from its
// children in the other, and begins where its leaves' entries would.
struct Buffer {
  std::uint32_t* indices;
  float* values;
};

inline Entries node(const Entries* leaves, const std::size_t* begins, std::size_t lo,
                    std::size_t hi, const Buffer& to, const Buffer& other) {
  if (hi - lo == 1) return leaves[lo];
  std::size_t half = 1;
  while (2 * half < hi - lo) half *= 2;
  const Entries a = node(leaves, begins, lo, lo + half, other, to);
  const Entries b = node(leaves, begins, lo + half, hi, other, to);
  return merge(a, b, to.indices + begins[lo], to.values + begins[lo]);
}

std::size_t sum(const SparseVector* vectors, std::size_t n, Dtype dtype, std::uint32_t* out_indices,
                float* out_values) {
  const std::unique_ptr<Entries[]> leaves(new Entries[n]);
  const std::unique_ptr<std::size_t[]> begins(new std::size_t[n]);
  std::size_t total = 0;
  for (std::size_t r = 0; r < n; ++r) {
    begins[r] = total;
    total += vectors[r].count;
  }
  const bool narrow = dtype != Dtype::kFloat32;
  const std::unique_ptr<float[]> wide(new float[narrow ? total : 0]), values(new float[total]);
  const std::unique_ptr<std::uint32_t[]> indices(new std::uint32_t[total]);
  for (std::size_t r = 0; r < n; ++r) {
    const SparseVector& from = vectors[r];
    float* const to = wide.get() + begins[r];
    leaves[r] = {from.indices, narrow ? to : static_cast<const float*>(from.values), from.count};
    if (!narrow) continue;
    with_type(dtype, [&](auto type) {
      using Type = decltype(type);
      const auto* stored = static_cast<const typename Type::Stored*>(from.values);
      for (std::size_t i = 0; i < from.count; ++i) to[i] = Type::widen(stored[i]);
    });
  }
  const Entries root = node(leaves.get(), begins.get(), 0, n, {out_indices, out_values},
                            {indices.get(), values.get()});
  if (n == 1 && root.count != 0)
    std::memcpy(out_indices, root.indices, root.count * sizeof(*out_indices));
  for (std::size_t i = 0; i < root.count; ++i) out_values[i] = Float32::narrow(root.values[i]);
  return root.count;
}

template <class Type>
bool scatter_as(const SparseVector& vector, std::uint64_t first, float divisor, void* out,
                std::size_t size) {
  const auto* values = static_cast<const float*>(vector.values);
  auto* const to = static_cast<typename Type::Stored*>(out);
  if (size != 0) std::memset(out, 0, size * sizeof(*to));
  std::uint32_t largest = 0;
  for (std::size_t i = 0; i < vector.count; ++i) {
    const auto stored = Type::narrow(divisor == 1.0F ? values[i] : values[i] / divisor);
    to[vector.indices[i] - first] = stored;
    largest = std::max(largest, key_of(Type::widen(stored)));
  }
  return largest < kInfinity;
}

bool scatter(const SparseVector& vector, std::uint64_t first, float divisor, void* out,
             std::size_t size, Dtype dtype) {
  return with_type(dtype, [&](auto type) {
    return scatter_as<decltype(type)>(vector, first, divisor, out, size);
  });
}
