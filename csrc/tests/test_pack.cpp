// The codecs of exact packing touch nothing that is not the payload's or the output's, whatever
// arrives, at each SIMD level. (tests/kernels/test_pack.py holds the bits to the document.)
//
// Payloads and outputs lie in heap blocks of their very sizes, so that under ASan a byte too far
// is seen; without it, guards see what is written.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "kernels/pack/pack.h"
#include "tests/check.h"
#include "tests/kernel_inputs.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace pycollective {
namespace {

Data pack_at(SimdLevel level, Dtype dtype, const Data& in, std::size_t offset = 0) {
  const std::size_t count = in.size() / size_of(dtype);
  Room from(in.size(), offset), out(pack_bound(dtype, count), offset);
  if (!in.empty()) std::memcpy(from.data(), in.data(), in.size());
  const std::size_t bytes = find_packing(dtype, level).pack(from.data(), count, out.data());
  CHECK(bytes <= pack_bound(dtype, count));
  from.check_guards();
  out.check_guards();
  return Data(out.data(), out.data() + bytes);
}

bool unpack_at(SimdLevel level, Dtype dtype, const Data& payload, Data& out,
               std::size_t offset = 0) {
  Room from(payload.size(), offset), to(out.size(), offset);
  if (!payload.empty()) std::memcpy(from.data(), payload.data(), payload.size());
  const bool good =
      find_packing(dtype, level)
          .unpack(from.data(), payload.size(), to.data(), out.size() / size_of(dtype));
  to.check_guards();
  if (!out.empty()) std::memcpy(out.data(), to.data(), out.size());
  return good;
}

// All levels: the same payload, and what came out is what went in. Returns the payload.
Data check_round_trip(Dtype dtype, const Data& in, std::size_t offset = 0) {
  const Data payload = pack_at(SimdLevel::kPortable, dtype, in, offset);
  for (const SimdLevel level : levels()) {
    CHECK(pack_at(level, dtype, in, offset) == payload);
    Data out(in.size());
    CHECK(unpack_at(level, dtype, payload, out, offset));
    CHECK(out == in);
  }
  return payload;
}

// --- Inputs.

template <class T>
Data data_of(const std::vector<T>& elements) {
  Data data(elements.size() * sizeof(T));
  if (!data.empty()) std::memcpy(data.data(), elements.data(), data.size());
  return data;
}

Data repeated(Dtype dtype, std::size_t count, std::uint32_t bits) {
  Data data;
  for (std::size_t i = 0; i < count; ++i)
    for (std::size_t byte = 0; byte < size_of(dtype); ++byte)
      data.push_back(static_cast<std::byte>(bits >> 8 * byte));
  return data;
}

Data random_bits(Dtype dtype, std::size_t count, Random& random) {
  Data data(count * size_of(dtype));
  for (std::byte& byte : data) byte = static_cast<std::byte>(random());
  return data;
}

int exponent_bits(Dtype dtype) {
  return static_cast<int>(8 * size_of(dtype)) - traits_of(dtype).mantissa - 1;
}

// Exponents at most `window` below `top`, all else random, every `rarely`-th bits of any kind.
Data window(Dtype dtype, std::size_t count, int top, int window, unsigned rarely, Random& random) {
  const int mantissa = traits_of(dtype).mantissa;
  std::vector<std::uint32_t> words;
  for (std::size_t i = 0; i < count; ++i) {
    const auto bits = static_cast<std::uint32_t>(random());
    const auto below = static_cast<int>(random() % static_cast<unsigned>(window + 1));
    const std::uint32_t exponent = below > top ? 0 : static_cast<std::uint32_t>(top - below);
    const std::uint32_t rest = bits & ~(((1U << exponent_bits(dtype)) - 1) << mantissa);
    words.push_back(random() % rarely == 0 ? bits : rest | exponent << mantissa);
  }
  Data data;
  for (const std::uint32_t word : words)
    for (std::size_t byte = 0; byte < size_of(dtype); ++byte)
      data.push_back(static_cast<std::byte>(word >> 8 * byte));
  return data;
}

// fp32 multiples of 2^(lowest - 150), of at most `width` bits; every `rarely`-th bits of any kind.
Data multiples(std::size_t count, int width, int lowest, unsigned rarely, Random& random) {
  std::vector<std::uint32_t> words;
  for (std::size_t i = 0; i < count; ++i) {
    auto integer = random() & ((1ULL << width) - 1);
    std::uint32_t bits = 0;
    if (integer != 0) {
      int top = 63 - __builtin_clzll(integer);
      if (top > 23) integer &= ~0ULL << (top - 23);
      const int exponent = lowest + top;
      const auto mantissa =
          static_cast<std::uint32_t>(top > 23 ? integer >> (top - 23) : integer << (23 - top));
      if (exponent > 0 && exponent < 255)
        bits = (mantissa & 0x7FFFFF) | static_cast<std::uint32_t>(exponent) << 23 |
               static_cast<std::uint32_t>(random() & 1) << 31;
    }
    words.push_back(random() % rarely == 0 ? static_cast<std::uint32_t>(random()) : bits);
  }
  return data_of(words);
}

// Bits with a meaning of their own in any of the types.
std::uint32_t special(Dtype dtype, Random& random) {
  const int bits = static_cast<int>(8 * size_of(dtype)), mantissa = traits_of(dtype).mantissa;
  const std::uint32_t sign = static_cast<std::uint32_t>(random() & 1) << (bits - 1);
  const std::uint32_t infinity = ((1U << exponent_bits(dtype)) - 1) << mantissa;
  const auto payload = static_cast<std::uint32_t>(random() & ((1U << mantissa) - 1));
  const std::uint32_t kinds[] = {
      0, payload, 1, infinity, infinity | payload, infinity | 1, infinity - 1, 1U << mantissa};
  return sign | kinds[random() % 8];
}

void sprinkle(Dtype dtype, Data& data, unsigned rarely, Random& random) {
  const std::size_t size = size_of(dtype);
  for (std::size_t at = 0; at < data.size(); at += size) {
    if (random() % rarely != 0) continue;
    const std::uint32_t bits = special(dtype, random);
    std::memcpy(data.data() + at, &bits, size);
  }
}

Data any_input(Dtype dtype, std::size_t count, Random& random) {
  Data data;
  const auto rarely = static_cast<unsigned>(1 + random() % 200);
  switch (random() % 6) {
    case 0:
      data = random_bits(dtype, count, random);
      break;
    case 1:
      data = repeated(dtype, count, special(dtype, random));
      break;
    case 2:
    case 3:
      if (dtype == Dtype::kFloat32) {
        const int width = static_cast<int>(1 + random() % 34);
        data = multiples(count, width, static_cast<int>(random() % 256), rarely, random);
        break;
      }
      [[fallthrough]];
    default: {
      const auto top = static_cast<int>(random() % (1U << exponent_bits(dtype)));
      data = window(dtype, count, top, static_cast<int>(random() % 140), rarely, random);
    }
  }
  if (random() % 2 == 0) sprinkle(dtype, data, static_cast<unsigned>(1 + random() % 300), random);
  return data;
}

// --- Tests.

void test_anything() {
  Random random(6);
  for (int i = 0; i < 20000; ++i) {
    const Dtype dtype = kTypes[i % 3];
    const std::size_t count = random() % (i % 10 == 0 ? 2000 : 400);
    check_round_trip(dtype, any_input(dtype, count, random), random() % 16);
  }
}

// A part of a payload, or more than one, is refused, however long.
void test_other_lengths() {
  Random random(7);
  for (int i = 0; i < 120; ++i) {
    const Dtype dtype = kTypes[i % 3];
    const Data in = any_input(dtype, 128 + random() % 300, random);
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

void test_hostile_payloads() {
  Random random(8);
  int seen[2] = {};
  for (int i = 0; i < 10000; ++i) {
    const Dtype dtype = kTypes[i % 3];
    const std::size_t count = 128 + random() % 400;
    const Data payload = pack_at(SimdLevel::kPortable, dtype, any_input(dtype, count, random));
    for (int j = 0; j < 12; ++j) {
      Data changed = payload;
      const std::size_t headers = std::min(count / 128 * 4, changed.size());
      for (auto left = 1 + random() % 4; left > 0; --left) {
        const std::size_t at = random() % (random() % 2 == 0 ? headers : changed.size());
        changed[at] = static_cast<std::byte>(random());
      }
      check_hostile(dtype, changed, count, seen);
    }
    Data garbage(random() % pack_bound(dtype, count));
    for (std::byte& byte : garbage) byte = static_cast<std::byte>(random() % (i % 2 ? 256 : 40));
    check_hostile(dtype, garbage, count, seen);
  }
  CHECK(seen[0] > 1000 && seen[1] > 1000);  // both kinds are there
}

// A host program may flush subnormals and round upwards: nothing changes.
void test_float_environment() {
#if defined(__x86_64__)
  Random random(9);
  for (int i = 0; i < 600; ++i) {
    const Dtype dtype = kTypes[i % 3];
    const Data in = any_input(dtype, random() % 600, random);
    const Data payload = pack_at(SimdLevel::kPortable, dtype, in);
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before | 0x8040 | (i % 2 == 0 ? 0x4000 : 0x6000));
    for (const SimdLevel level : levels()) {
      CHECK(pack_at(level, dtype, in) == payload);
      Data out(in.size());
      CHECK(unpack_at(level, dtype, payload, out));
      CHECK(out == in);
    }
    _mm_setcsr(before);
  }
#endif
}

}  // namespace
}  // namespace pycollective

int main() {
  using namespace pycollective;
  test_anything();
  test_other_lengths();
  test_hostile_payloads();
  test_float_environment();
  std::puts("packing: ok");
}
