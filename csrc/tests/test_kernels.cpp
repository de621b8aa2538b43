// The kernels of copies, packing, compression and accumulators touch nothing that is not an
// argument's, whatever arrives, at each SIMD level. (tests/kernels holds the bits to the document.)
//
// Arrays lie in heap blocks of their very sizes, so that under ASan a byte too far is seen; without
// it, guards see what is written.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <iterator>
#include <vector>

#include "kernels/copy.h"
#include "kernels/pack/pack.h"
#include "kernels/quantize/quantize.h"
#include "kernels/sparse/sparse.h"
#include "tests/check.h"
#include "tests/kernel_inputs.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace pycollective {
namespace {

using Indices = std::vector<std::uint32_t>;

// --- Inputs. What a case is made of is drawn, never counted: one counter for two would tie them.

Dtype any_dtype(Random& random) { return kTypes[random() % std::size(kTypes)]; }

bool one_in(std::uint64_t n, Random& random) { return random() % n == 0; }

Data random_bytes(std::size_t size, Random& random) {
  Data data(size);
  for (std::byte& byte : data) byte = static_cast<std::byte>(random());
  return data;
}

// Finite numbers of any magnitude, or close to each other, with zeros and ties; one in `rarely` has
// any bits.
Data numbers(Dtype dtype, std::size_t count, std::uint64_t rarely, Random& random) {
  const int mantissa = traits_of(dtype).mantissa;
  const int exponent = static_cast<int>(8 * size_of(dtype)) - mantissa - 1;
  const auto top = random() % ((1U << exponent) - 1), spread = 1 + random() % 40;
  const std::uint64_t exponents = ((std::uint64_t{1} << exponent) - 1) << mantissa;
  Data data(count * size_of(dtype));
  for (std::size_t i = 0; i < count; ++i) {
    std::uint64_t bits = random();
    if (random() % rarely != 0) {
      bits = (bits & ~exponents) | (top - std::min(random() % spread, top)) << mantissa;
      if (one_in(16, random)) bits = one_in(2, random) ? 0 : top << mantissa;
    }
    std::memcpy(&data[i * size_of(dtype)], &bits, size_of(dtype));
  }
  return data;
}

// fp32 multiples of one power of two, which packing writes as fixed point.
Data multiples(std::size_t count, std::uint64_t rarely, Random& random) {
  const auto width = 1 + random() % 30, lowest = 1 + random() % 250;
  Data data(count * sizeof(float));
  for (std::size_t i = 0; i < count; ++i) {
    float number =
        std::ldexp(static_cast<float>(random() % (1ULL << width)), static_cast<int>(lowest) - 150);
    if (one_in(2, random)) number = -number;
    std::uint32_t bits = static_cast<std::uint32_t>(random());
    if (!one_in(rarely, random)) std::memcpy(&bits, &number, sizeof(bits));
    std::memcpy(&data[i * sizeof(float)], &bits, sizeof(bits));
  }
  return data;
}

template <class T>
T* as(Room& room) {
  return reinterpret_cast<T*>(room.data());
}

// --- Packing.

Data any_packed(Dtype dtype, std::size_t count, Random& random) {
  const std::uint64_t rarely = one_in(8, random) ? 1 : 1 + random() % 300;
  if (dtype == Dtype::kFloat32 && one_in(2, random)) return multiples(count, rarely, random);
  return numbers(dtype, count, rarely, random);
}

Data pack_at(SimdLevel level, Dtype dtype, const Data& in, std::size_t offset = 0) {
  const std::size_t count = in.size() / size_of(dtype);
  Room from(in, offset), out(pack_bound(dtype, count), offset);
  const std::size_t bytes = find_packing(dtype, level).pack(from.data(), count, out.data());
  CHECK(bytes <= pack_bound(dtype, count));
  from.check_guards();
  out.check_guards();
  return Data(out.data(), out.data() + bytes);
}

bool unpack_at(SimdLevel level, Dtype dtype, const Data& payload, Data& out,
               std::size_t offset = 0) {
  Room from(payload, offset), to(out.size(), offset);
  const bool good =
      find_packing(dtype, level)
          .unpack(from.data(), payload.size(), to.data(), out.size() / size_of(dtype));
  to.check_guards();
  out = to.copy();
  return good;
}

void check_round_trip(Dtype dtype, const Data& in, const Data& payload, std::size_t offset) {
  for (const SimdLevel level : levels()) {
    CHECK(pack_at(level, dtype, in, offset) == payload);
    Data out(in.size());
    CHECK(unpack_at(level, dtype, payload, out, offset) && out == in);
  }
}

void test_packing() {
  Random random(6);
  for (int i = 0; i < 20000; ++i) {
    const Dtype dtype = any_dtype(random);
    const Data in = any_packed(dtype, random() % (one_in(10, random) ? 2000 : 400), random);
    const std::size_t offset = random() % 16;
    const Data payload = pack_at(SimdLevel::kPortable, dtype, in, offset);
#if defined(__x86_64__)  // a host program may flush subnormals and round upwards: nothing changes
    const unsigned before = _mm_getcsr();
    if (i % 8 == 0) _mm_setcsr(before | 0x8040 | (i % 16 == 0 ? 0x4000 : 0x6000));
#endif
    check_round_trip(dtype, in, payload, offset);
#if defined(__x86_64__)
    _mm_setcsr(before);
#endif
  }
}

// A part of a payload, or more than one, is refused, however long.
void test_packed_of_other_lengths() {
  Random random(7);
  for (int i = 0; i < 120; ++i) {
    const Dtype dtype = any_dtype(random);
    const Data in = any_packed(dtype, 128 + random() % 300, random);
    const Data payload = pack_at(SimdLevel::kPortable, dtype, in);
    for (std::size_t bytes = 0; bytes < in.size() + 40; ++bytes) {
      Data other = payload;
      other.resize(bytes);
      for (const SimdLevel level : levels()) {
        Data out(in.size());
        const bool good = unpack_at(level, dtype, other, out);
        if (bytes > in.size()) CHECK(!good);
        if (payload.size() < in.size() && bytes != in.size())
          CHECK(good == (bytes == payload.size()));
      }
    }
  }
}

// Whatever a payload holds, all levels agree on whether it is one, and on what is in it.
void check_hostile(Dtype dtype, const Data& payload, std::size_t count, int (&seen)[2]) {
  Data first(count * size_of(dtype));
  const bool good = unpack_at(SimdLevel::kPortable, dtype, payload, first);
  ++seen[good];
  for (const SimdLevel level : levels()) {
    Data out(first.size());
    CHECK(unpack_at(level, dtype, payload, out) == good);
    if (good) CHECK(out == first);
  }
}

void test_hostile_packed() {
  Random random(8);
  int seen[2] = {};
  for (int i = 0; i < 10000; ++i) {
    const Dtype dtype = any_dtype(random);
    const std::size_t count = 128 + random() % 400;
    const Data payload = pack_at(SimdLevel::kPortable, dtype, any_packed(dtype, count, random));
    for (int j = 0; j < 12; ++j) {
      Data changed = payload;
      const std::size_t headers = std::min(count / 128 * 4, changed.size());
      for (auto left = 1 + random() % 4; left > 0; --left)
        changed[random() % (one_in(2, random) ? headers : changed.size())] =
            static_cast<std::byte>(random());
      check_hostile(dtype, changed, count, seen);
    }
    Data garbage(random() % pack_bound(dtype, count));
    for (std::byte& byte : garbage) byte = static_cast<std::byte>(random() % (i % 2 ? 256 : 40));
    check_hostile(dtype, garbage, count, seen);
  }
  CHECK(seen[0] > 1000 && seen[1] > 1000);  // both kinds are there
}

// --- Quantization. A codec is named by its number, which is the same at each level.

const std::size_t kCodecs = quantize_codecs(SimdLevel::kPortable).size();

std::size_t bytes_of(std::size_t codec, std::size_t chunk, std::size_t count) {
  return quantized_bytes(quantize_codecs(SimdLevel::kPortable)[codec], chunk, count);
}

std::size_t any_chunk(Random& random) {
  const std::size_t some[] = {64, 128, 256, 320, 1024, 4096, 65536};
  return some[random() % std::size(some)];
}

// Whether all was finite.
bool quantize(std::size_t codec, std::size_t chunk, Dtype dtype, const Data& x, const Data* held,
              std::size_t offset) {
  const std::size_t count = x.size() / size_of(dtype);
  bool finite = false;
  for (const SimdLevel level : levels()) {
    Room from(x, offset), before(held == nullptr ? Data() : *held, offset);
    Room left(count * sizeof(float), offset), payload(bytes_of(codec, chunk, count), offset);
    finite = quantize_codecs(level)[codec].find(dtype).quantize(
        from.data(), held == nullptr ? nullptr : as<float>(before), as<float>(left), count, chunk,
        payload.data());
    for (Room* room : {&from, &before, &left, &payload}) room->check_guards();
  }
  return finite;
}

void dequantize(std::size_t codec, std::size_t chunk, Dtype dtype, const Data& payloads,
                std::size_t rows, std::size_t stride, std::size_t count, float divisor,
                std::size_t offset) {
  for (const SimdLevel level : levels()) {
    Room from(payloads, offset), out(count * size_of(dtype), offset);
    quantize_codecs(level)[codec].find(dtype).dequantize(from.data(), rows, stride, chunk,
                                                         out.data(), count, divisor);
    from.check_guards();
    out.check_guards();
  }
}

// Numbers of any kind are quantized, and rows of any bytes at all are summed.
void test_quantizing() {
  Random random(1);
  int seen[2] = {};
  for (std::size_t i = 0; i < 3000 * kCodecs; ++i) {
    const std::size_t codec = random() % kCodecs, chunk = any_chunk(random);
    const Dtype dtype = any_dtype(random);
    const std::size_t count = random() % (one_in(10, random) ? 9000 : 700);
    const std::size_t offset = random() % 64;
    const Data x = numbers(dtype, count, one_in(4, random) ? 1 + random() % 500 : ~0ULL, random);
    const Data held = numbers(Dtype::kFloat32, count, ~0ULL, random);
    ++seen[quantize(codec, chunk, dtype, x, one_in(5, random) ? nullptr : &held, offset)];
    const std::size_t rows = 1 + random() % (one_in(50, random) ? 200 : 12);
    const std::size_t size = bytes_of(codec, chunk, count), stride = size + random() % 9;
    const Data payloads = random_bytes((rows - 1) * stride + size, random);
    const float divisor = one_in(3, random) ? 1 : static_cast<float>(rows);
    dequantize(codec, chunk, dtype, payloads, rows, stride, count, divisor, offset);
  }
  CHECK(seen[0] > 100 && seen[1] > 500);  // both kinds are there
}

// What goes past the caches, on and off a line's beginning: at any byte, at which no number lies as
// its type would have it.
void test_large_quantized() {
  Random random(3);
  for (std::size_t i = 0; i < 12 * kCodecs; ++i) {  // each codec, type and kind of place once
    const std::size_t codec = i % kCodecs;
    const Dtype dtype = kTypes[i / kCodecs % 3];
    const std::size_t count = (1 << 20) + random() % 3000, chunk = any_chunk(random);
    const std::size_t kind = i / kCodecs % 4;
    const std::size_t offset = kind < 2 ? 0 : kind == 2 ? 4 * (random() % 16) : random() % 64;
    const Data held(count * sizeof(float));
    quantize(codec, chunk, dtype, numbers(dtype, count, ~0ULL, random), &held, offset);
    const Data payload = random_bytes(bytes_of(codec, chunk, count), random);
    dequantize(codec, chunk, dtype, payload, 1, payload.size(), count, 1, offset);
  }
}

// --- Top-k selection and sparse sums.

Room room_for(std::size_t words) { return Room(words * sizeof(std::uint32_t), 0); }

void test_selection() {
  Random random(1);
  for (int round = 0; round < 300; ++round) {
    const Dtype dtype = any_dtype(random);
    const std::size_t count = one_in(20, random) ? 40'000 + random() % 9 : 1 + random() % 700;
    Room x(numbers(dtype, count, ~0ULL, random), 0);
    Room held(numbers(Dtype::kFloat32, count, ~0ULL, random), 0);
    const std::size_t k = one_in(3, random) ? count : 1 + random() % (count / 8 + 1);
    const std::size_t chunk = 64 * (1 + random() % 6), each = 1 + random() % chunk;
    const float* const residual = one_in(2, random) ? as<float>(held) : nullptr;
    for (const SimdLevel level : levels()) {
      const Sparse sparse = find_sparse(level);
      Room left = room_for(count), indices = room_for(k), selected = room_for(k);
      Room chunks = room_for(selected_by_chunk(count, each, chunk));
      const Gradient gradient{dtype, x.data(), residual, as<float>(left), count};
      sparse.top_k(gradient, k, as<std::uint32_t>(indices));
      sparse.top_k_chunks(gradient, each, chunk, as<std::uint32_t>(chunks));
      CHECK(sparse.select(as<float>(left), count, 0x40000000, 3, as<std::uint32_t>(selected), k) <=
            k);
      for (Room* room : {&left, &indices, &selected, &chunks}) room->check_guards();
    }
  }
}

// No key is above that of the NaN whose bits are all set. So many in a chunk, in every chunk.
void test_largest_nan() {
  for (const std::size_t many : {1, 4, 9, 16})
    for (const std::size_t count : {64, 4'096, 300'000})
      for (const SimdLevel level : levels()) {
        const std::size_t chunk = std::min<std::size_t>(count, 4'096);
        Room x = room_for(count), left = room_for(count), indices = room_for(many);
        Room chunks = room_for(selected_by_chunk(count, many, chunk));
        std::fill_n(as<float>(x), count, 1.0F);
        for (std::size_t at = 0; at < count; at += chunk)
          for (std::size_t i = 0; i < many && at + 3 * i < count; ++i)
            std::memset(as<float>(x) + at + 3 * i, 0xFF, sizeof(float));
        const Gradient gradient{Dtype::kFloat32, x.data(), nullptr, as<float>(left), count};
        const Sparse sparse = find_sparse(level);
        CHECK(sparse.top_k(gradient, many, as<std::uint32_t>(indices)) == kNotFinite);
        CHECK(sparse.top_k_chunks(gradient, many, chunk, as<std::uint32_t>(chunks)) == kNotFinite);
        for (Room* room : {&left, &indices, &chunks}) room->check_guards();
      }
}

Indices any_indices(std::size_t count, Random& random) {
  Indices indices;
  std::uint64_t next = 0;
  const int wide = static_cast<int>(random() % 22);
  for (std::size_t i = 0; i < count; ++i) {
    next += one_in(40, random) ? random() % (1 << 23) : random() % (1U << wide);
    if (next >= 0xFFFFFFFF) break;
    indices.push_back(static_cast<std::uint32_t>(next++));
  }
  return indices;
}

Data data_of(const Indices& indices) {
  const auto* bytes = reinterpret_cast<const std::byte*>(indices.data());
  return Data(bytes, bytes + indices.size() * sizeof(std::uint32_t));
}

Data pack_at(SimdLevel level, const Indices& indices, std::uint64_t size) {
  Room from(data_of(indices), 0), out(packed_indices_bound(indices.size(), size), 0);
  const std::size_t bytes =
      find_sparse(level).pack(as<std::uint32_t>(from), indices.size(), out.data());
  out.check_guards();
  return Data(out.data(), out.data() + bytes);
}

// Whether the payload is taken; if it is, what came out ascends, and is the same at each level.
bool check_payload(const Data& payload, std::uint64_t size, std::size_t count,
                   const Indices* indices = nullptr) {
  Room from(payload, 0);
  bool taken = false;
  Data expected;
  for (const SimdLevel level : levels()) {
    const Sparse sparse = find_sparse(level);
    Room out = room_for(count);
    const bool good =
        sparse.unpack(from.data(), payload.size(), size, as<std::uint32_t>(out), count);
    out.check_guards();
    if (level == SimdLevel::kPortable) {
      taken = good;
      expected = out.copy();
    }
    CHECK(good == taken);
    if (!good) continue;
    CHECK(out.copy() == expected && sparse.ascends(as<std::uint32_t>(out), count, size));
  }
  CHECK(indices == nullptr || (taken && expected == data_of(*indices)));
  return taken;
}

void test_packed_indices() {
  Random random(3);
  int seen[2] = {};
  for (int round = 0; round < 1500; ++round) {
    const Indices indices = any_indices(1 + random() % 600, random);
    const std::uint64_t size = indices.back() + 1 + random() % 100;
    const Data payload = pack_at(SimdLevel::kPortable, indices, size);
    for (const SimdLevel level : levels()) CHECK(pack_at(level, indices, size) == payload);
    check_payload(payload, size, indices.size(), &indices);
    const auto headers = 1 + 2 * ((indices.size() + 127) / 128);
    for (int spoil = 0; spoil < 12; ++spoil) {
      Data bad = payload;
      const std::size_t among = spoil % 2 == 0 ? headers : bad.size();
      for (std::uint64_t i = 0; i <= random() % 3; ++i)
        bad[random() % among] = static_cast<std::byte>(random() % (spoil % 3 == 0 ? 50 : 256));
      if (spoil == 10) bad.resize(random() % bad.size());
      if (spoil == 11) bad.resize(bad.size() + random() % 9);
      const std::size_t count = spoil == 9 ? random() % 500 : indices.size();
      ++seen[check_payload(bad, one_in(4, random) ? random() % (size + 1) : size, count)];
    }
    Data garbage(random() % 300);
    for (std::byte& byte : garbage) byte = static_cast<std::byte>(random() % 40);
    if (!garbage.empty()) garbage[0] = std::byte{1};
    ++seen[check_payload(garbage, random() >> random() % 60 & 0xFFFFFFFF, random() % 400)];
  }
  CHECK(seen[0] > 1000 && seen[1] > 1000);  // both kinds are there
}

void test_sums_and_scatter() {
  Random random(4);
  for (int round = 0; round < 300; ++round) {
    const Dtype dtype = any_dtype(random);
    std::deque<Room> rooms;
    std::vector<SparseVector> vectors;
    std::size_t total = 0;
    for (std::size_t n = 1 + random() % 9; n > 0; --n) {
      Indices indices = any_indices(random() % 100, random);
      for (std::uint32_t& index : indices) index >>= 3;
      indices.erase(std::unique(indices.begin(), indices.end()), indices.end());
      Room& places = rooms.emplace_back(data_of(indices), 0);
      Room& values = rooms.emplace_back(numbers(dtype, indices.size(), ~0ULL, random), 0);
      vectors.push_back({as<std::uint32_t>(places), values.data(), indices.size()});
      total += indices.size();
    }
    for (const SimdLevel level : levels()) {
      const Sparse sparse = find_sparse(level);
      Room places = room_for(total), sums = room_for(total);
      auto* const indices = as<std::uint32_t>(places);
      const std::size_t found =
          sparse.sum(vectors.data(), vectors.size(), dtype, indices, as<float>(sums));
      CHECK(found <= total && sparse.ascends(indices, found, std::uint64_t{1} << 32));
      places.check_guards();
      sums.check_guards();
      const std::size_t size = found == 0 ? 0 : indices[found - 1] + std::size_t{1};
      if (size > 100'000) continue;
      for (const Dtype to : kTypes) {
        Room out(size * size_of(to), 0);
        sparse.scatter({indices, sums.data(), found}, 0, 3, out.data(), size, to);
        out.check_guards();
      }
    }
  }
}

// --- Accumulators.

void test_accumulation() {
  constexpr Dtype kLeaves[] = {Dtype::kFloat32, Dtype::kBFloat16, Dtype::kFloat16,
                               Dtype::kFloat8E4M3, Dtype::kFloat8E5M2};
  constexpr std::uint64_t kFinite = std::uint64_t{1} << 40;
  Random random(12);
  for (int round = 0; round < 400; ++round) {
    const Dtype dtype = kLeaves[random() % std::size(kLeaves)];
    const std::size_t count = random() % 200, n = random() % 4;
    const Data leaf = numbers(dtype, count, kFinite, random);
    std::vector<Data> nodes(n);
    for (Data& node : nodes) node = numbers(Dtype::kFloat32, count, kFinite, random);
    const bool streaming = one_in(2, random), in_place = n != 0 && one_in(2, random);
    Data first;
    for (const SimdLevel level : levels()) {
      Room from(leaf, random() % 64), apart(4 * count, random() % 16 * 4);
      std::deque<Room> rows;
      std::vector<const float*> terms;
      for (const Data& node : nodes)
        terms.push_back(
            reinterpret_cast<float*>(rows.emplace_back(node, random() % 16 * 4).data()));
      Room& out = in_place ? rows.back() : apart;
      find_accumulate(dtype, level)(from.data(), terms.data(), static_cast<int>(n),
                                    reinterpret_cast<float*>(out.data()), count, streaming);
      from.check_guards();
      apart.check_guards();
      for (const Room& row : rows) row.check_guards();
      for (std::size_t i = 0; i + in_place < n; ++i) CHECK(rows[i].copy() == nodes[i]);
      if (level == SimdLevel::kPortable) first = out.copy();
      CHECK(out.copy() == first);
    }
  }
}

// Every byte and no other, whatever the addresses and the tail.
void test_copying() {
  Random random(13);
  for (int round = 0; round < 4000; ++round) {
    const std::size_t bytes = random() % (one_in(8, random) ? 9000 : 700);
    const std::size_t to_skip = random() % 130, from_skip = random() % 130;
    const Data from = random_bytes(from_skip + bytes, random);
    Data want(to_skip + bytes + 64, std::byte{0x5A});
    std::copy_n(from.begin() + static_cast<long>(from_skip), bytes,
                want.begin() + static_cast<long>(to_skip));
    for (const SimdLevel level : levels())
      for (const CopyFn copy : {find_copies(level).plain, find_copies(level).streaming}) {
        Data to(want.size(), std::byte{0x5A});
        copy(to.data() + to_skip, from.data() + from_skip, bytes);
        finish_stores();
        CHECK(to == want);
      }
  }
}

}  // namespace
}  // namespace pycollective

int main() {
  using namespace pycollective;
  test_copying();
  test_packing();
  test_packed_of_other_lengths();
  test_hostile_packed();
  const FloatEnvironment ieee;
  test_quantizing();
  test_large_quantized();
  test_selection();
  test_largest_nan();
  test_packed_indices();
  test_sums_and_scatter();
  test_accumulation();
  std::puts("kernels: ok");
}
