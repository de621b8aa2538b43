// The ordered reduce on a GPU, or on the stand-in for one, gives the bits of the CPU's kernels, and
// touches nothing else: each case is one piece of the device's memory, compared whole.

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "kernels/kernels.h"
#include "tests/cuda_session.h"
#include "tests/number_inputs.h"

namespace pycollective::cuda {
namespace {

constexpr std::size_t kMostElements = 700;
constexpr std::size_t kRoom = 64 + 8 * kMostElements;  // of a leaf or a result, and a gap

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
  bool in_place;
  bool copied;
};

void check_case(const Session& session, DeviceMemory& memory, const DtypeTraits& dtype, ReduceOp op,
                const Case& what, Random& random, std::size_t room_bytes = kRoom) {
  const std::size_t rooms = static_cast<std::size_t>(what.n) + 2;
  const std::size_t alike = random() % 16;
  const std::size_t bytes = what.count * dtype.size;
  Data before(rooms * room_bytes, std::byte{0xA5});
  std::vector<std::size_t> offsets;
  for (std::size_t room = 0; room < rooms; ++room)
    offsets.push_back(room * room_bytes + 16 + offset_of(what.aligned, alike, dtype.size, random));

  ReduceParameters p{};
  std::vector<const void*> leaves;
  for (int leaf = 0; leaf < what.n; ++leaf) {
    const std::size_t offset = offsets[static_cast<std::size_t>(leaf)];
    for (std::size_t i = 0; i < what.count; ++i)
      write_element(dtype, before.data() + offset + i * dtype.size, random);
    p.leaves[leaf] = memory.at(offset);
    leaves.push_back(before.data() + offset);
  }
  const std::size_t out = what.in_place ? offsets[random() % static_cast<unsigned>(what.n)]
                                        : offsets[static_cast<std::size_t>(what.n)];
  p.out = memory.at(out);
  p.copy = what.copied ? memory.at(offsets.back()) : nullptr;
  p.count = what.count;
  p.n = what.n;

  Data result(bytes);
  {
    const FloatEnvironment ieee;
    find_kernels(dtype.dtype, op, active_simd_level())
        .reduce(leaves.data(), what.n, result.data(), nullptr, what.count);
  }
  Data after = before;
  if (bytes > 0) {
    std::memcpy(after.data() + out, result.data(), bytes);
    if (what.copied) std::memcpy(after.data() + offsets.back(), result.data(), bytes);
  }

  memory.write(before);
  launch_reduce(session.kernels(), dtype.dtype, op, p, session.stream());
  if (memory.read(after.size()) != after) {
    std::fprintf(stderr, "%s %s: n %d, count %zu, alignment %d, in place %d, copied %d\n",
                 dtype.name, name_of(op), what.n, what.count, static_cast<int>(what.aligned),
                 what.in_place, what.copied);
    CHECK(false);
  }
}

// Of every `stride`th dtype and operation.
void test_bits_are_those_of_the_cpu(const Session& session, int stride, int& cases) {
  Random random(1);
  int pair = 0;
  DeviceMemory memory(session, (kMostLeaves + 2) * kRoom);
  for (const DtypeTraits& dtype : kDtypeTable)
    for (const ReduceOpTraits& op : kReduceOpTable) {
      if (!is_defined(dtype.dtype, op.op) || pair++ % stride != 0) continue;
      for (int n = 1; n <= kMostLeaves; n = n < 17 ? n + 1 : n < 59 ? n + 7 : n + 5)
        for (const Aligned aligned :
             {Aligned::kWhole, Aligned::kAlike, Aligned::kElements, Aligned::kBytes}) {
          const std::size_t most = n > 17 ? 100 : kMostElements;
          const std::size_t count = cases % 7 == 0 ? random() % 9 : random() % (most + 1);
          check_case(session, memory, dtype, op.op,
                     {n, count, aligned, random() % 4 == 0, random() % 2 == 0}, random);
          ++cases;
        }
    }
}

// So many vectors that each thread takes several together, and comes back for more: of 2 and 4
// leaves, which have loops of their own, of 8, and of numbers that take the general one.
void test_many_vectors(const Session& session, int& cases) {
  Random random(2);
  constexpr std::size_t kLarge = 40000;  // elements
  constexpr std::size_t kLargeRoom = 64 + 8 * kLarge;
  DeviceMemory memory(session, (9 + 2) * kLargeRoom);
  for (const Dtype dtype : {Dtype::kBFloat16, Dtype::kFloat32, Dtype::kFloat64, Dtype::kUInt8})
    for (const int n : {2, 3, 4, 5, 8, 9})
      for (const std::size_t count : {kLarge, kLarge - 1 - random() % 3000}) {
        check_case(session, memory, traits_of(dtype), ReduceOp::kSum,
                   {n, count, Aligned::kAlike, random() % 2 == 0, random() % 2 == 0}, random,
                   kLargeRoom);
        ++cases;
      }
}

template <class Call>
bool is_refused(const Call& call) {
  try {
    call();
  } catch (const std::invalid_argument&) {
    return true;
  }
  return false;
}

void test_what_the_contract_does_not_define_is_refused(const Session& session) {
  ReduceParameters p{};
  p.n = 1;
  const auto launch = [&](Dtype dtype, ReduceOp op) {
    launch_reduce(session.kernels(), dtype, op, p, session.stream());
  };
  CHECK(is_refused([&] { launch(Dtype::kBool, ReduceOp::kAvg); }));
  CHECK(is_refused([&] { launch(Dtype::kBool, ReduceOp::kSum); }));
  CHECK(is_refused([&] { launch(Dtype::kFloat32, ReduceOp::kBand); }));
  p.n = 0;
  CHECK(is_refused([&] { launch(Dtype::kFloat32, ReduceOp::kSum); }));
  p.n = kMostLeaves + 1;
  CHECK(is_refused([&] { launch(Dtype::kFloat32, ReduceOp::kSum); }));
}

// A thread's own context is current again, or none is.
void test_a_context_is_put_back() {
  const auto current = [] {
    CUcontext context = nullptr;
    OK(driver().cuCtxGetCurrent(&context));
    return context;
  };
  CHECK(current() == nullptr);
  {
    const Session session;
    const CUcontext own = current();
    CHECK(own != nullptr);
    {
      const Current again(own);
      CHECK(current() == own);
    }
    CHECK(current() == own);
  }
  CHECK(current() == nullptr);
}

void test_an_error_has_its_names() {
  try {
    OK(driver().cuDeviceGet(nullptr, 0));
  } catch (const DriverError& error) {
    CHECK(error.result() == CUDA_ERROR_INVALID_VALUE);
    CHECK(std::strstr(error.what(), "cuDeviceGet") != nullptr);
    CHECK(std::strstr(error.what(), "CUDA_ERROR_INVALID_VALUE, ") != nullptr);
    return;
  }
  CHECK(false);
}

}  // namespace
}  // namespace pycollective::cuda

int main(int argc, char** argv) {
  using namespace pycollective::cuda;
  const int stride = argc > 1 ? std::atoi(argv[1]) : 1;
  CHECK(stride > 0);
  test_a_context_is_put_back();
  test_an_error_has_its_names();
  const Session session;
  int cases = 0;
  test_bits_are_those_of_the_cpu(session, stride, cases);
  test_many_vectors(session, cases);
  test_what_the_contract_does_not_define_is_refused(session);
  std::printf("%d reductions, kernels %s\n", cases, session.kernels().origin().c_str());
  return 0;
}
