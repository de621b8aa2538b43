// How much of a GPU's own copy bandwidth does the ordered reduce of 8 bf16 leaves have?
//
//   reduce_bandwidth [MiB of a leaf, 256] [measurements, 20]
//
// In turn, median of each: a copy on the device of half the bytes that the reduce moves, which
// reads and writes as many as that; and the reduce. Times are the driver's events', or the host's
// where it has none that measure. Prints a line of JSON: bytes a second that each reads and writes.

#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "tests/cuda_session.h"

namespace pycollective::cuda {
namespace {

constexpr int kLeaves = 8;
constexpr int kWarmup = 3;
constexpr unsigned kOnes = 0x3F803F80;  // two bf16 ones

// Times what is put on the stream between its two calls. The table of the core has no clock.
class Timer {
 public:
  explicit Timer(const Session& session) : session_(session) {
    void* const library = dlopen(driver().library.c_str(), RTLD_NOW | RTLD_NOLOAD);
    if (library != nullptr)
      elapsed_ = reinterpret_cast<Elapsed>(dlsym(library, "cuEventElapsedTime"));
    for (CUevent& event : events_) OK(driver().cuEventCreate(&event, 0));
  }
  ~Timer() {
    for (const CUevent event : events_) OK(driver().cuEventDestroy(event));
  }
  const char* clock() const { return elapsed_ != nullptr ? "events" : "host"; }

  template <class Act>
  double seconds(const Act& act) {
    session_.synchronize();
    const auto start = std::chrono::steady_clock::now();
    OK(driver().cuEventRecord(events_[0], session_.stream()));
    act();
    OK(driver().cuEventRecord(events_[1], session_.stream()));
    session_.synchronize();
    const auto end = std::chrono::steady_clock::now();
    if (elapsed_ == nullptr) return std::chrono::duration<double>(end - start).count();
    float milliseconds = 0;
    OK(elapsed_(&milliseconds, events_[0], events_[1]));
    return milliseconds / 1e3;
  }

 private:
  using Elapsed = CUresult (*)(float*, CUevent, CUevent);
  const Session& session_;
  Elapsed elapsed_ = nullptr;
  CUevent events_[2] = {};
};

double median(std::vector<double> samples) {
  std::sort(samples.begin(), samples.end());
  return samples[samples.size() / 2];
}

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
  Timer timer(session);
  std::vector<double> copies, reductions;
  for (int i = -kWarmup; i < measurements; ++i) {
    const double copy = timer.seconds(
        [&] { OK(driver().cuMemcpyAsync(begin + copied, begin, copied, session.stream())); });
    const double reduction = timer.seconds([&] {
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
