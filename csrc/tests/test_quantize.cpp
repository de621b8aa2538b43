// Quantization touches nothing that is not an argument's, whatever comes in, at each SIMD level.
// (tests/kernels/test_quantize.py holds the bits to the document.)
//
// Arrays lie in heap blocks of their very sizes, so that under ASan a byte too far is seen; without
// it, guards see what is written.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <string>
#include <vector>

#include "kernels/quantize/quantize.h"
#include "tests/check.h"
#include "tests/kernel_inputs.h"

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

// Whether all was finite.
bool quantize(std::size_t codec, std::size_t chunk, Dtype dtype, const Data& x, const Data* held,
              std::size_t offset) {
  const std::size_t count = x.size() / size_of(dtype);
  bool finite = false;
  for (const SimdLevel level : levels()) {
    Room from(x, offset), before(held == nullptr ? Data() : *held, offset);
    Room left(count * sizeof(float), offset), payload(bytes_of(codec, chunk, count), offset);
    finite = at_level(level, codec)
                 .find(dtype)
                 .quantize(from.data(),
                           held == nullptr ? nullptr : reinterpret_cast<float*>(before.data()),
                           reinterpret_cast<float*>(left.data()), count, chunk, payload.data());
    for (Room* room : {&from, &before, &left, &payload}) room->check_guards();
  }
  return finite;
}

void dequantize(std::size_t codec, std::size_t chunk, Dtype dtype, const Data& payloads,
                std::size_t rows, std::size_t stride, std::size_t count, float divisor,
                std::size_t offset) {
  for (const SimdLevel level : levels()) {
    Room from(payloads, offset), out(count * size_of(dtype), offset);
    at_level(level, codec)
        .find(dtype)
        .dequantize(from.data(), rows, stride, chunk, out.data(), count, divisor);
    from.check_guards();
    out.check_guards();
  }
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

// What a case is made of is drawn, never counted: one counter for two of them would tie them.
std::size_t any_codec(Random& random) { return random() % kCodecs; }

Dtype any_dtype(Random& random) { return kTypes[random() % std::size(kTypes)]; }

bool one_in(std::uint64_t n, Random& random) { return random() % n == 0; }

std::size_t any_chunk(Random& random) {
  const std::size_t some[] = {64, 128, 256, 320, 1024, 4096, 65536};
  return some[random() % 7];
}

// --- Tests.

void test_anything() {
  Random random(1);
  int seen[2] = {};
  for (std::size_t i = 0; i < 3000 * kCodecs; ++i) {
    const std::size_t codec = any_codec(random);
    const Dtype dtype = any_dtype(random);
    const std::size_t count = random() % (one_in(10, random) ? 9000 : 700);
    const Data x = numbers(dtype, count, one_in(4, random) ? 1 + random() % 500 : ~0ULL, random);
    const Data held = numbers(Dtype::kFloat32, count, ~0ULL, random);
    const std::size_t offset = random() % 64;
    ++seen[quantize(codec, any_chunk(random), dtype, x, one_in(5, random) ? nullptr : &held,
                    offset)];
  }
  CHECK(seen[0] > 100 && seen[1] > 500);  // both kinds are there
}

// Rows of any bytes at all, and rows that end where they must.
void test_hostile_payloads() {
  Random random(2);
  for (std::size_t i = 0; i < 2000 * kCodecs; ++i) {
    const std::size_t codec = any_codec(random), chunk = any_chunk(random);
    const Dtype dtype = any_dtype(random);
    const std::size_t count = random() % (one_in(10, random) ? 6000 : 500);
    const std::size_t rows = 1 + random() % (one_in(50, random) ? 200 : 12);
    const std::size_t size = bytes_of(codec, chunk, count), stride = size + random() % 9;
    const Data payloads = random_bytes((rows - 1) * stride + size, random);
    const float divisor = one_in(3, random) ? 1 : static_cast<float>(rows);
    dequantize(codec, chunk, dtype, payloads, rows, stride, count, divisor, random() % 64);
  }
}

// What goes past the caches, on and off a line's beginning: at any byte, at which no number lies as
// its type would have it.
void test_large() {
  Random random(3);
  for (std::size_t i = 0; i < 12 * kCodecs; ++i) {  // each codec, type and kind of place once
    const std::size_t codec = i % kCodecs;
    const Dtype dtype = kTypes[i / kCodecs % 3];
    const std::size_t count = (1 << 20) + random() % 3000, chunk = any_chunk(random);
    const std::size_t kind = i / kCodecs % 4;
    const std::size_t offset = kind < 2 ? 0 : kind == 2 ? 4 * (random() % 16) : random() % 64;
    const Data x = numbers(dtype, count, ~0ULL, random);
    const Data held(count * sizeof(float));
    quantize(codec, chunk, dtype, x, &held, offset);
    const Data payload = random_bytes(bytes_of(codec, chunk, count), random);
    dequantize(codec, chunk, dtype, payload, 1, payload.size(), count, 1, offset);
  }
}

}  // namespace
}  // namespace pycollective

int main() {
  using namespace pycollective;
  const FloatEnvironment ieee;
  test_anything();
  test_hostile_payloads();
  test_large();
  std::puts("quantization: ok");
}
