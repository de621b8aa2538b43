// How much of a GPU's own copy bandwidth does the ordered reduce of 8 bf16 leaves have?
//
//   reduce_bandwidth [MiB of a leaf, 256] [measurements, 20]
//
// In turn, median of each: a copy on the device of half the bytes that the reduce moves, which
// reads and writes as many as that; and the reduce. Times are the driver's events', or the host's
// where it has none that measure. What the last reduce has made is compared with the CPU's sums.
// Prints a line of JSON: bytes a second that each reads and writes.

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "repeated.h"
#include "tests/cuda_session.h"
#include "timer.h"

namespace pycollective::cuda {
namespace {

constexpr int kLeaves = 8;
constexpr int kWarmup = 3;

void measure(std::size_t leaf_bytes, int measurements) {
  const Session session;
  const DeviceMemory memory(session, (kLeaves + 1) * leaf_bytes);
  const auto begin = reinterpret_cast<CUdeviceptr>(memory.at(0));
  Random random(1);
  const Repeated arrays(kLeaves, leaf_bytes, random);
  ReduceParameters p{};
  for (int leaf = 0; leaf < kLeaves; ++leaf) {
    p.leaves[leaf] = memory.at(leaf * leaf_bytes);
    arrays.write(begin + leaf * leaf_bytes, leaf, leaf_bytes, session.stream());
  }
  p.out = memory.at(kLeaves * leaf_bytes);
  p.count = leaf_bytes / 2;
  p.n = kLeaves;

  const std::size_t moved = (kLeaves + 1) * leaf_bytes;
  const std::size_t copied = moved / 2 / 256 * 256;
  const DeviceMemory copy_of_half(session, copied);
  const auto half = reinterpret_cast<CUdeviceptr>(copy_of_half.at(0));
  const CUdeviceptr sums = begin + kLeaves * leaf_bytes;
  Timer timer;
  std::vector<double> copies, reductions;
  for (int i = -kWarmup; i < measurements; ++i) {
    // What is compared is what the last reduce makes.
    OK(driver().cuMemsetD32Async(sums, ~0U, leaf_bytes / 4, session.stream()));
    const double copy = timer.seconds(session.stream(), [&] {
      OK(driver().cuMemcpyAsync(half, begin, copied, session.stream()));
    });
    const double reduction = timer.seconds(session.stream(), [&] {
      launch_reduce(session.kernels(), Dtype::kBFloat16, ReduceOp::kSum, p, session.stream());
    });
    if (i < 0) continue;
    copies.push_back(copy);
    reductions.push_back(reduction);
  }
  Data made(leaf_bytes);
  OK(driver().cuMemcpyAsync(reinterpret_cast<CUdeviceptr>(made.data()), sums, leaf_bytes,
                            session.stream()));
  session.synchronize();
  arrays.check_sums(made);
  const double copy = 2.0 * static_cast<double>(copied) / median(copies);
  const double reduce = static_cast<double>(moved) / median(reductions);
  std::printf(
      "{\"leaf_bytes\": %zu, \"leaves\": %d, \"dtype\": \"bfloat16\", \"copy_bytes_per_s\": %.6g, "
      "\"reduce_bytes_per_s\": %.6g, \"share_of_copy\": %.4f, \"measurements\": %d, "
      "\"clock\": \"%s\", \"kernels\": \"%s\"}\n",
      leaf_bytes, kLeaves, copy, reduce, reduce / copy, measurements, timer.clock(),
      session.kernels().origin().c_str());
}

}  // namespace
}  // namespace pycollective::cuda

int main(int count, char** arguments) {
  const auto number = [&](int at, long otherwise) {
    return count > at ? std::strtol(arguments[at], nullptr, 10) : otherwise;
  };
  const long leaf_mib = number(1, 256), measurements = number(2, 20);
  CHECK(leaf_mib > 0 && measurements > 0);
  pycollective::cuda::measure(static_cast<std::size_t>(leaf_mib) << 20,
                              static_cast<int>(measurements));
}
