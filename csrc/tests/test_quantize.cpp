// Quantization: the same bits at each SIMD level, and whatever comes in, nothing is touched that is
// not an argument's.
//
// Arrays lie in heap blocks of their very sizes, so that under ASan a byte too far is seen; without
// it, guards see what is written. (tests/kernels/test_quantize.py holds the bits to the document.)

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "kernels/quantize/quantize.h"
#include "tests/check.h"
#include "tests/kernel_inputs.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace pycollective {
namespace {

// A codec is named by its number, which is the same at each level.
const std::size_t kCodecs = quantize_codecs(SimdLevel::kPortable).size();

const QuantizeCodec& at_level(SimdLevel level, std::size_t codec) {
  return quantize_codecs(level)[codec];
}

std::size_t bytes_of(std::size_t codec, std::size_t chunk, std::size_t count) {
  return quantized_bytes(at_level(SimdLevel::kPortable, codec), chunk, count);
}

struct Quantized {
  bool finite;
  Data payload, left;
};

Quantized quantize_at(SimdLevel level, std::size_t codec, std::size_t chunk, Dtype dtype,
                      const Data& x, const Data* held, std::size_t offset) {
  const std::size_t count = x.size() / size_of(dtype);
  Room from(x, offset), before(held == nullptr ? Data() : *held, offset);
  Room left(count * sizeof(float), offset), payload(bytes_of(codec, chunk, count), offset);
  const FloatEnvironment ieee;
  const bool finite =
      at_level(level, codec)
          .find(dtype)
          .quantize(from.data(),
                    held == nullptr ? nullptr : reinterpret_cast<float*>(before.data()),
                    reinterpret_cast<float*>(left.data()), count, chunk, payload.data());
  for (Room* room : {&from, &before, &left, &payload}) room->check_guards();
  if (!finite) return {false, {}, {}};
  return {true, payload.copy(), left.copy()};
}

Data dequantize_at(SimdLevel level, std::size_t codec, std::size_t chunk, Dtype dtype,
                   const Data& payloads, std::size_t rows, std::size_t stride, std::size_t count,
                   float divisor, std::size_t offset) {
  Room from(payloads, offset), out(count * size_of(dtype), offset);
  const FloatEnvironment ieee;
  at_level(level, codec)
      .find(dtype)
      .dequantize(from.data(), rows, stride, chunk, out.data(), count, divisor);
  from.check_guards();
  out.check_guards();
  return out.copy();
}

// --- Inputs.

Data random_bytes(std::size_t size, Random& random) {
  Data data(size);
  for (std::byte& byte : data) byte = static_cast<std::byte>(random());
  return data;
}

// Numbers of all magnitudes; one in `rarely` of any bits.
Data numbers(Dtype dtype, std::size_t count, std::uint64_t rarely, Random& random) {
  const int mantissa = traits_of(dtype).mantissa;
  const int exponent = static_cast<int>(8 * size_of(dtype)) - mantissa - 1;
  const auto top = random() % ((1U << exponent) - 1);
  Data data;
  for (std::size_t i = 0; i < count; ++i) {
    std::uint64_t bits = random();
    if (random() % rarely != 0) {
      const std::uint64_t below = std::min<std::uint64_t>(random() % 20, top);
      bits = (bits & ~(((std::uint64_t{1} << exponent) - 1) << mantissa)) | (top - below)
                                                                                << mantissa;
    }
    for (std::size_t byte = 0; byte < size_of(dtype); ++byte)
      data.push_back(static_cast<std::byte>(bits >> 8 * byte));
  }
  return data;
}

std::size_t any_chunk(Random& random) {
  const std::size_t some[] = {64, 128, 256, 320, 1024, 4096, 65536};
  return some[random() % 7];
}

// --- Tests.

Quantized check_quantize(std::size_t codec, std::size_t chunk, Dtype dtype, const Data& x,
                         const Data* held, std::size_t offset) {
  const Quantized first = quantize_at(SimdLevel::kPortable, codec, chunk, dtype, x, held, offset);
  for (const SimdLevel level : levels()) {
    const Quantized other = quantize_at(level, codec, chunk, dtype, x, held, offset);
    CHECK(other.finite == first.finite);
    CHECK(other.payload == first.payload);
    CHECK(other.left == first.left);
  }
  return first;
}

void check_dequantize(std::size_t codec, std::size_t chunk, Dtype dtype, const Data& payloads,
                      std::size_t rows, std::size_t stride, std::size_t count, float divisor,
                      std::size_t offset) {
  const auto at = [&](SimdLevel level) {
    return dequantize_at(level, codec, chunk, dtype, payloads, rows, stride, count, divisor,
                         offset);
  };
  const Data first = at(SimdLevel::kPortable);
  for (const SimdLevel level : levels()) CHECK(at(level) == first);
}

void test_anything() {
  Random random(1);
  int seen[2] = {};
  for (std::size_t i = 0; i < 3000 * kCodecs; ++i) {
    const Dtype dtype = kTypes[i % 3];
    const std::size_t count = random() % (i % 10 == 0 ? 9000 : 700);
    const Data x = numbers(dtype, count, i % 4 == 0 ? 1 + random() % 500 : ~0ULL, random);
    const Data held = numbers(Dtype::kFloat32, count, ~0ULL, random);
    const std::size_t offset = random() % 64;
    const bool finite = check_quantize(i / 3 % kCodecs, any_chunk(random), dtype, x,
                                       i % 5 == 0 ? nullptr : &held, offset)
                            .finite;
    ++seen[finite];
  }
  CHECK(seen[0] > 100 && seen[1] > 500);  // both kinds are there
}

// Rows of any bytes at all, and rows that end where they must.
void test_hostile_payloads() {
  Random random(2);
  for (std::size_t i = 0; i < 2000 * kCodecs; ++i) {
    const std::size_t codec = i % kCodecs;
    const std::size_t chunk = any_chunk(random), count = random() % (i % 10 == 0 ? 6000 : 500);
    const std::size_t rows = 1 + random() % (i % 50 == 0 ? 200 : 12);
    const std::size_t size = bytes_of(codec, chunk, count), stride = size + random() % 9;
    const Data payloads = random_bytes((rows - 1) * stride + size, random);
    const float divisor = i % 3 == 0 ? 1 : static_cast<float>(rows);
    check_dequantize(codec, chunk, kTypes[i / kCodecs % 3], payloads, rows, stride, count, divisor,
                     random() % 64);
  }
}

// What goes past the caches, on and off a line's beginning: at any byte, at which no number lies as
// its type would have it.
void test_large() {
  Random random(3);
  for (std::size_t i = 0; i < 12 * kCodecs; ++i) {
    const std::size_t codec = i % kCodecs;
    const Dtype dtype = kTypes[i / kCodecs % 3];
    const std::size_t count = (1 << 20) + random() % 3000, chunk = any_chunk(random);
    const std::size_t kind = i / kCodecs % 4;
    const std::size_t offset = kind < 2 ? 0 : kind == 2 ? 4 * (random() % 16) : random() % 64;
    const Data x = numbers(dtype, count, ~0ULL, random);
    const Data held(count * sizeof(float));
    const Quantized one = check_quantize(codec, chunk, dtype, x, &held, offset);
    if (one.finite)
      check_dequantize(codec, chunk, dtype, one.payload, 1, one.payload.size(), count, 1, offset);
  }
}

// A host program may flush subnormals and round upwards: callers hold a FloatEnvironment.
void test_float_environment() {
#if defined(__x86_64__)
  Random random(4);
  for (std::size_t i = 0; i < 150 * kCodecs; ++i) {
    const Dtype dtype = kTypes[i % 3];
    const Data x = numbers(dtype, 300, 20, random);
    const Quantized first =
        quantize_at(SimdLevel::kPortable, i % kCodecs, 128, dtype, x, nullptr, 0);
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before | 0x8040 | (i % 2 == 0 ? 0x4000 : 0x6000));
    for (const SimdLevel level : levels()) {
      const Quantized other = quantize_at(level, i % kCodecs, 128, dtype, x, nullptr, 0);
      CHECK(other.finite == first.finite && other.payload == first.payload &&
            other.left == first.left);
    }
    _mm_setcsr(before);
  }
#endif
}

// The same codecs in the same order, whose records are of the same length.
void test_levels_have_the_same_codecs() {
  const QuantizeCodecs first = quantize_codecs(SimdLevel::kPortable);
  for (const SimdLevel level : levels()) {
    const QuantizeCodecs other = quantize_codecs(level);
    CHECK(other.size() == first.size());
    for (std::size_t i = 0; i < first.size(); ++i) {
      CHECK(other[i].name == std::string(first[i].name));
      for (const std::size_t count : {1, 7, 64, 65, 1000, 65536})
        CHECK(other[i].record_bytes(count) == first[i].record_bytes(count));
    }
  }
}

void test_other_types_have_none() {
  for (int i = 0; i < kDtypes; ++i) {
    const auto dtype = static_cast<Dtype>(i);
    const bool coded = std::find(std::begin(kTypes), std::end(kTypes), dtype) != std::end(kTypes);
    for (const SimdLevel level : levels())
      for (const QuantizeCodec& codec : quantize_codecs(level))
        CHECK((codec.find(dtype).quantize != nullptr) == coded);
  }
}

}  // namespace
}  // namespace pycollective

int main() {
  using namespace pycollective;
  test_levels_have_the_same_codecs();
  test_anything();
  test_hostile_payloads();
  test_large();
  test_float_environment();
  test_other_types_have_none();
  std::puts("quantization: ok");
}
