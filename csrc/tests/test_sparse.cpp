// The kernels of top-k selection and sparse sums touch nothing that is not the input's or the
// output's, whatever arrives, at each SIMD level. (tests/kernels/test_sparse.py has the bits.)
//
// Inputs and outputs lie in heap blocks of their very sizes, so that ASan sees an element too far.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "kernels/sparse/sparse.h"
#include "tests/check.h"
#include "tests/kernel_inputs.h"

namespace pycollective {
namespace {

using Indices = std::vector<std::uint32_t>;

// A copy of so many elements in a block of their very size.
template <class T>
class Exact {
 public:
  explicit Exact(std::size_t count) : count_(count), memory_(new T[count]()) {}
  explicit Exact(const std::vector<T>& from) : Exact(from.size()) {
    std::copy(from.begin(), from.end(), memory_.get());
  }
  T* data() const { return memory_.get(); }
  std::vector<T> copy() const { return {data(), data() + count_}; }

 private:
  std::size_t count_;
  std::unique_ptr<T[]> memory_;
};

// Bits of numbers, of any size or close to each other, with some ties and zeros.
std::vector<std::byte> any_numbers(Dtype dtype, std::size_t count, Random& random) {
  std::vector<std::byte> data(count * size_of(dtype));
  const bool close = random() % 2 == 0;
  const int bits = dtype == Dtype::kFloat16 ? 5 : 8, mantissa = traits_of(dtype).mantissa;
  for (std::size_t i = 0; i < count; ++i) {
    std::uint64_t word = random();
    std::uint64_t exponent = (word >> 40) % ((1U << bits) - 1);
    if (close) exponent = exponent % 4 + (1U << (bits - 1));
    std::uint64_t number = (word & ((1U << mantissa) - 1)) | exponent << mantissa;
    if (word >> 60 == 0) number = word >> 59 & 1 ? 0 : std::uint64_t{1} << mantissa;
    number |= (word >> 32 & 1) << (bits + mantissa);
    std::memcpy(data.data() + i * size_of(dtype), &number, size_of(dtype));
  }
  return data;
}

void test_selection() {
  Random random(1);
  for (int round = 0; round < 300; ++round) {
    const Dtype dtype = kTypes[round % 3];
    const std::size_t count = round % 20 == 0 ? 40'000 + random() % 9 : 1 + random() % 700;
    const Exact<std::byte> x(any_numbers(dtype, count, random));
    Exact<float> held(count);
    const auto bits = any_numbers(Dtype::kFloat32, count, random);
    std::memcpy(held.data(), bits.data(), bits.size());
    const std::size_t k = random() % 3 == 0 ? count : 1 + random() % (count / 8 + 1);
    const std::size_t chunk = 64 * (1 + random() % 6), each = 1 + random() % chunk;
    const float* const residual = random() % 2 == 0 ? held.data() : nullptr;
    for (const SimdLevel level : levels()) {
      const Sparse sparse = find_sparse(level);
      Exact<float> left(count);
      Exact<std::uint32_t> indices(k), chunks(selected_by_chunk(count, each, chunk));
      const Gradient gradient{dtype, x.data(), residual, left.data(), count};
      sparse.top_k(gradient, k, indices.data());
      sparse.top_k_chunks(gradient, each, chunk, chunks.data());
      Exact<std::uint32_t> selected(k);
      const std::uint32_t key = 0x40000000;
      CHECK(sparse.select(left.data(), count, key, 3, selected.data(), k) <=
            static_cast<std::int64_t>(k));
    }
  }
}

// No key is above that of the NaN whose bits are all set. So many in a chunk, in every chunk.
void test_largest_nan() {
  for (const std::size_t many : {1, 4, 9, 16})
    for (const std::size_t count : {64, 4'096, 300'000})
      for (const SimdLevel level : levels()) {
        std::vector<std::uint32_t> bits(count, 0x3F800000);
        const std::size_t chunk = std::min<std::size_t>(count, 4'096);
        for (std::size_t at = 0; at < count; at += chunk)
          for (std::size_t i = 0; i < many && at + 3 * i < count; ++i) bits[at + 3 * i] = ~0U;
        const Exact<float> x(count);
        std::memcpy(x.data(), bits.data(), count * sizeof(float));
        Exact<float> left(count);
        const Gradient gradient{Dtype::kFloat32, x.data(), nullptr, left.data(), count};
        Exact<std::uint32_t> indices(many), chunks(selected_by_chunk(count, many, chunk));
        CHECK(find_sparse(level).top_k(gradient, many, indices.data()) == kNotFinite);
        CHECK(find_sparse(level).top_k_chunks(gradient, many, chunk, chunks.data()) == kNotFinite);
      }
}

Indices any_indices(std::size_t count, Random& random) {
  Indices indices;
  std::uint64_t next = 0;
  const int wide = static_cast<int>(random() % 22);
  for (std::size_t i = 0; i < count; ++i) {
    next += random() % 40 == 0 ? random() % (1 << 23) : random() % (1U << wide);
    if (next >= 0xFFFFFFFF) break;
    indices.push_back(static_cast<std::uint32_t>(next++));
  }
  return indices;
}

std::vector<std::byte> pack_at(SimdLevel level, const Indices& indices, std::uint64_t size) {
  const Exact<std::uint32_t> from(indices);
  const Exact<std::byte> out(packed_indices_bound(indices.size(), size));
  const std::size_t bytes = find_sparse(level).pack(from.data(), indices.size(), out.data());
  CHECK(bytes <= packed_indices_bound(indices.size(), size));
  return {out.data(), out.data() + bytes};
}

// Whether the payload is taken; if it is, what came out ascends, and is the same at each level.
bool check_payload(const std::vector<std::byte>& payload, std::uint64_t size, std::size_t count,
                   Indices* found = nullptr) {
  const Exact<std::byte> from(payload);
  bool taken = false;
  Indices expected;
  for (const SimdLevel level : levels()) {
    const Sparse sparse = find_sparse(level);
    const Exact<std::uint32_t> out(count);
    const bool good = sparse.unpack(from.data(), payload.size(), size, out.data(), count);
    if (level == SimdLevel::kPortable) {
      taken = good;
      expected = out.copy();
    }
    CHECK(good == taken);
    if (!good) continue;
    CHECK(out.copy() == expected);
    CHECK(sparse.ascends(out.data(), count, size));
  }
  if (found != nullptr) *found = expected;
  return taken;
}

void test_packed_indices() {
  Random random(2);
  for (int round = 0; round < 600; ++round) {
    const Indices indices = any_indices(random() % 600, random);
    const std::uint64_t size = (indices.empty() ? 0 : indices.back()) + 1 + random() % 1000;
    const auto payload = pack_at(SimdLevel::kPortable, indices, size);
    for (const SimdLevel level : levels()) CHECK(pack_at(level, indices, size) == payload);
    Indices found;
    CHECK(check_payload(payload, size, indices.size(), &found));
    CHECK(found == indices);
  }
}

void test_hostile_payloads() {
  Random random(3);
  int seen[2] = {};
  for (int round = 0; round < 1500; ++round) {
    const Indices indices = any_indices(1 + random() % 400, random);
    const std::uint64_t size = indices.back() + 1 + random() % 100;
    const auto payload = pack_at(SimdLevel::kPortable, indices, size);
    const auto headers = 1 + 2 * ((indices.size() + 127) / 128);
    for (int spoil = 0; spoil < 12; ++spoil) {
      auto bad = payload;
      const std::size_t among = spoil % 2 == 0 ? headers : bad.size();
      for (std::uint64_t i = 0; i <= random() % 3; ++i)
        bad[random() % among] = static_cast<std::byte>(random() % (spoil % 3 == 0 ? 50 : 256));
      if (spoil == 10) bad.resize(random() % bad.size());
      if (spoil == 11) bad.resize(bad.size() + random() % 9);
      const std::size_t count = spoil == 9 ? random() % 500 : indices.size();
      ++seen[check_payload(bad, random() % 4 == 0 ? random() % (size + 1) : size, count)];
    }
    std::vector<std::byte> garbage(random() % 300);
    for (std::byte& byte : garbage) byte = static_cast<std::byte>(random() % 40);
    if (!garbage.empty()) garbage[0] = std::byte{1};
    ++seen[check_payload(garbage, random() >> random() % 60 & 0xFFFFFFFF, random() % 400)];
  }
  CHECK(seen[0] > 1000 && seen[1] > 1000);  // both kinds are there
}

void test_sums_and_scatter() {
  Random random(4);
  for (int round = 0; round < 300; ++round) {
    const Dtype dtype = kTypes[round % 3];
    const std::size_t n = 1 + random() % 9;
    std::vector<std::unique_ptr<Exact<std::uint32_t>>> places;
    std::vector<std::unique_ptr<Exact<std::byte>>> values;
    std::vector<SparseVector> vectors;
    std::size_t total = 0;
    for (std::size_t r = 0; r < n; ++r) {
      Indices indices = any_indices(random() % 100, random);
      for (std::uint32_t& index : indices) index >>= 3;
      indices.erase(std::unique(indices.begin(), indices.end()), indices.end());
      places.push_back(std::make_unique<Exact<std::uint32_t>>(indices));
      values.push_back(
          std::make_unique<Exact<std::byte>>(any_numbers(dtype, indices.size(), random)));
      vectors.push_back({places[r]->data(), values[r]->data(), indices.size()});
      total += indices.size();
    }
    for (const SimdLevel level : levels()) {
      const Sparse sparse = find_sparse(level);
      const Exact<std::uint32_t> indices(total);
      const Exact<float> sums(total);
      const std::size_t found = sparse.sum(vectors.data(), n, dtype, indices.data(), sums.data());
      CHECK(found <= total);
      CHECK(sparse.ascends(indices.data(), found, std::uint64_t{1} << 32));
      const std::size_t size = found == 0 ? 0 : indices.data()[found - 1] + std::size_t{1};
      if (size > 100'000) continue;
      for (const Dtype to : kTypes) {
        const Exact<std::byte> out(size * size_of(to));
        sparse.scatter({indices.data(), sums.data(), found}, Dtype::kFloat32, 3, out.data(), size,
                       to);
      }
    }
  }
}

}  // namespace
}  // namespace pycollective

int main() {
  using namespace pycollective;
  const FloatEnvironment ieee;
  test_selection();
  test_largest_nan();
  test_packed_indices();
  test_hostile_payloads();
  test_sums_and_scatter();
  std::puts("sparse: ok");
}
