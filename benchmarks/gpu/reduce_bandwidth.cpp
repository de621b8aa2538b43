// How much of a GPU's own copy bandwidth does the ordered reduce of 8 bf16 leaves have?
//
//   reduce_bandwidth [MiB of a leaf, 256] [measurements, 20]
//
// In turn, median of each: a copy on the device of half the bytes that the reduce moves, which
// reads and writes as many as that; and the reduce. Times are the driver's events', or the host's
// where it has none that measure. Prints a line of JSON: bytes a second that each reads and writes.

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "tests/cuda_session.h"
#include "timer.h"

namespace pycollective::cuda {
namespace {

constexpr int kLeaves = 8;
constexpr int kWarmup = 3;
constexpr unsigned kOnes = 0x3F803F80;  // two bf16 ones

void measure(std::size_t leaf_bytes, int measurements) {
  const Session session;
  const DeviceMemory memory(session, (kLeaves + 1) * leaf_bytes);
  const auto begin = reinterpret_cast<CUdeviceptr>(memory.at(0));
  OK(driver().cuMemsetD32Async(begin, kOnes, (kLeaves + 1) * leaf_bytes / 4, session.stream()));
  ReduceParameters p{};
  for (int leaf = 0; leaf < kLeaves; ++leaf) p.leaves[leaf] = memory.at(leaf * leaf_bytes);
  p.out = memory.at(kLeaves * leaf_bytes);
  p.count = leaf_bytes / 2;
  p.n = kLeaves;

  const std::size_t moved = (kLeaves + 1) * leaf_bytes;
  const std::size_t copied = moved / 2 / 256 * 256;
  Timer timer;
  std::vector<double> copies, reductions;
  for (int i = -kWarmup; i < measurements; ++i) {
    const double copy = timer.seconds(session.stream(), [&] {
      OK(driver().cuMemcpyAsync(begin + copied, begin, copied, session.stream()));
    });
    const double reduction = timer.seconds(session.stream(), [&] {
      launch_reduce(session.kernels(), Dtype::kBFloat16, ReduceOp::kSum, p, session.stream());
    });
    if (i < 0) continue;
    copies.push_back(copy);
    reductions.push_back(reduction);
  }
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
