// The ordered reduce of GPUs' kernels (cuda/reduce.h), compiled for the CPU: it gives the bits of
// the CPU's own kernels, for every number of leaves, and touches nothing else. Each case is one
// piece of memory, compared whole.

#include <cstdio>
#include <cstring>
#include <vector>

#include "cuda/reduce.h"
#include "kernels/kernels.h"
#include "tests/check.h"
#include "tests/number_inputs.h"

namespace pycollective::cuda {
namespace {

constexpr std::size_t kMostElements = 700;
constexpr std::size_t kRoom = 64 + 8 * kMostElements;  // of a leaf or a result, and a gap

template <class Codec, class Op, bool kAverage = false, class Vectors = Codec>
void reduce_as(const std::vector<const void*>& leaves, const Target& target, std::uint64_t count,
               Share share) {
  const auto leaf = [&](int i) { return leaves[static_cast<std::size_t>(i)]; };
  reduce<Codec, Op, kAverage, Vectors>(leaf, static_cast<int>(leaves.size()), target, count, share);
}

struct Reduction {
  Dtype dtype;
  ReduceOp op;
  void (*run)(const std::vector<const void*>& leaves, const Target& target, std::uint64_t count,
              Share share);  // what one thread does
};

#define REDUCTION(name, kType, op, kOp, Codec, ...) \
  {Dtype::kType, ReduceOp::kOp, reduce_as<Codec, __VA_ARGS__>},
constexpr Reduction kReductions[] = {EACH_REDUCTION(REDUCTION)};

enum class Aligned { kWhole, kAlike, kElements, kBytes };

// Where in its room a leaf or a result begins.
std::size_t offset_of(Aligned aligned, std::size_t alike, std::size_t element, Random& random) {
  switch (aligned) {
    case Aligned::kWhole:
      return 0;
    case Aligned::kAlike:
      return alike / element * element;
    case Aligned::kElements:
      return random() % 16 / element * element;
    case Aligned::kBytes:
      break;
  }
  return random() % 16;
}

struct Case {
  int n;
  std::size_t count;
  Aligned aligned;
};

void check_case(const Reduction& reduction, const Case& what, Random& random,
                std::size_t room_bytes = kRoom) {
  const std::size_t element = size_of(reduction.dtype), bytes = what.count * element;
  const std::size_t rooms = static_cast<std::size_t>(what.n) + 2;
  const std::size_t alike = random() % 16;
  Data memory(rooms * room_bytes + 16, std::byte{0xA5});
  const std::size_t first = (16 - reinterpret_cast<std::uintptr_t>(memory.data()) % 16) % 16;
  std::vector<std::size_t> offsets;
  for (std::size_t room = 0; room < rooms; ++room)
    offsets.push_back(first + room * room_bytes + 16 +
                      offset_of(what.aligned, alike, element, random));
  std::vector<const void*> leaves;
  for (int leaf = 0; leaf < what.n; ++leaf) {
    std::byte* const at = memory.data() + offsets[static_cast<std::size_t>(leaf)];
    for (std::size_t i = 0; i < what.count; ++i)
      write_element(traits_of(reduction.dtype), at + i * element, random);
    leaves.push_back(at);
  }
  const bool in_place = random() % 4 == 0, copied = random() % 2 == 0;
  const std::size_t out = in_place ? offsets[random() % static_cast<unsigned>(what.n)]
                                   : offsets[static_cast<std::size_t>(what.n)];

  const FloatEnvironment ieee;
  Data result(bytes), expected = memory;
  find_kernels(reduction.dtype, reduction.op, active_simd_level())
      .reduce(leaves.data(), what.n, what.n, result.data(), nullptr, what.count);
  if (bytes > 0) {
    std::memcpy(expected.data() + out, result.data(), bytes);
    if (copied) std::memcpy(expected.data() + offsets.back(), result.data(), bytes);
  }

  auto* const begin = reinterpret_cast<char*>(memory.data());
  const Target target{begin + out, copied ? begin + offsets.back() : nullptr, what.n};
  const std::uint64_t threads = 1 + random() % 64;
  for (std::uint64_t thread = 0; thread < threads; ++thread)
    reduction.run(leaves, target, what.count, {thread, threads});
  if (memory == expected) return;
  std::fprintf(stderr, "%s %s: n %d, count %zu, alignment %d, in place %d, copied %d\n",
               name_of(reduction.dtype), name_of(reduction.op), what.n, what.count,
               static_cast<int>(what.aligned), in_place, copied);
  CHECK(false);
}

void test_every_number_of_leaves() {
  Random random(1);
  for (const Reduction& reduction : kReductions)
    for (int n = 1; n <= kMostLeaves; n = n < 17 ? n + 1 : n < 59 ? n + 7 : n + 5)
      for (const Aligned aligned :
           {Aligned::kWhole, Aligned::kAlike, Aligned::kElements, Aligned::kBytes}) {
        const std::size_t most = n > 17 ? 100 : kMostElements;
        const std::size_t count = random() % (random() % 7 == 0 ? 9 : most + 1);
        check_case(reduction, {n, count, aligned}, random);
      }
}

// So many vectors that each thread takes several together, and comes back for more: of 2, 4 and 8
// leaves, which have loops of their own, and of numbers that take the general one.
void test_many_vectors() {
  Random random(2);
  constexpr std::size_t kLarge = 40000;  // elements
  for (const Reduction& reduction : kReductions)
    if (reduction.op == ReduceOp::kSum)
      for (const int n : {2, 3, 4, 5, 8, 9})
        check_case(reduction, {n, kLarge - random() % 3000, Aligned::kAlike}, random,
                   64 + 8 * kLarge);
}

}  // namespace
}  // namespace pycollective::cuda

int main() {
  using namespace pycollective::cuda;
  test_every_number_of_leaves();
  test_many_vectors();
  std::puts("ordered reduce of GPUs: ok");
}
