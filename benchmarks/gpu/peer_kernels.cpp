// What kernels over peer memory do where several ranks of one process share a GPU, a stream each:
// the time of a small all-reduce by one-shot, and the bandwidth of a large one by "direct".
//
//   peer_kernels [rounds, 200] [measurements, 20] [elements whose bits are compared, 4 Mi + 3]
//                [KiB of a rank ..., 65536 262144]
//
// Run in csrc/tests, where the programs are. One-shot is of 4 Ki float32. It is the time of the
// last rank to come: the others' kernels wait for it already; beside it that of the smallest
// launch. Direct is of bfloat16, and counts the bytes that all ranks read and write
// (engine/gpu/peer_memory.h); beside it a copy of as many, up to 2 GiB. A rank has a quarter of
// the blocks that fit the GPU, as in the library, or its share where that is less, and is measured
// with its share too where that is more. What the last call of each size has made is compared with
// the CPU's sums. Medians. Prints a line of JSON: microseconds, and bytes a second.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "peer_calls.h"

namespace pycollective::testing {
namespace {

constexpr std::size_t kSmall = 4096;  // elements
constexpr int kWarmup = 3;
constexpr std::size_t kMostCopied = std::size_t{1} << 30;
constexpr std::size_t kMostFilled = std::size_t{512} << 20;  // while it is, the host queues a call

struct Plan {
  int rounds = 200, measurements = 20;
  std::size_t checked = (std::size_t{4} << 20) + 3;
  std::vector<std::size_t> sizes;  // bytes of a rank
};

class Bench {
 public:
  Bench(Devices& devices, const Plan& plan) : devices_(devices), plan_(plan) {
    std::size_t largest = 0;
    for (const std::size_t bytes : plan_.sizes) largest = std::max(largest, bytes);
    half_ = std::min(kMostCopied, static_cast<std::size_t>(moved(8, largest)) / 512 * 256);
    OK(driver().cuMemAlloc(&scratch_, 2 * half_));
  }
  ~Bench() { OK(driver().cuMemFree(scratch_)); }
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;
  const char* clock() const { return timer_.clock(); }
  double bare_launch() const { return median(bare_); }

  // Median seconds of one-shot.
  double one_shot_of(int n) {
    const unsigned fit = fitting(Dtype::kFloat32) / static_cast<unsigned>(n);
    DeviceRanks ranks = make(n, std::min(usual(), fit), std::size_t{1} << 16);
    const Placed call(call_of(one_shot(n), Dtype::kFloat32, kSmall), 0, random_);
    check_bits(ranks, call);
    Rank& last = ranks.at(n - 1);
    std::vector<double> times;
    for (int i = -kWarmup; i < plan_.rounds; ++i) {
      if (i + 1 == plan_.rounds) call.write(ranks);  // what is compared, of this call alone
      const auto others = [&] {
        for (int r = 0; r + 1 < n; ++r) call.launch(ranks.at(r), r, kLongestWait);
        fill(last.stream);
      };
      const double took =
          timer_.seconds(last.stream, others, [&] { call.launch(last, n - 1, kLongestWait); });
      ranks.synchronize();
      const double bare = timer_.seconds(
          last.stream, [&] { fill(last.stream); }, [&] { launch_nothing(last.stream); });
      if (i < 0) continue;
      times.push_back(took);
      bare_.push_back(bare);
    }
    ranks.check_no_endings();
    call.check(ranks);
    return median(times);
  }

  // By how many blocks a rank has: those of the library, and all that fit.
  std::vector<unsigned> blocks_of(int n) const {
    const unsigned share = fitting(Dtype::kBFloat16) / static_cast<unsigned>(n);
    CHECK(share > 0);
    if (share > usual()) return {usual(), share};
    return {share};
  }

  // Lines of JSON, one for each size.
  std::vector<std::string> direct_of(int n, unsigned blocks) {
    std::size_t memory = 4 * plan_.checked + 4096, largest = 0;
    for (const std::size_t bytes : plan_.sizes) largest = std::max(largest, bytes);
    memory = std::max(memory, 2 * largest);
    DeviceRanks ranks = make(n, blocks, memory);
    const Programs programs = programs_of("direct", OpKind::kAllReduce, n);
    check_bits(ranks, Placed(call_of(programs, Dtype::kBFloat16, plan_.checked), 0, random_));
    const Repeated arrays(n, largest, random_);
    std::vector<std::string> lines;
    for (const std::size_t bytes : plan_.sizes)
      lines.push_back(bandwidth(ranks, programs, arrays, bytes));
    return lines;
  }

 private:
  unsigned fitting(Dtype dtype) const {
    return static_cast<unsigned>(devices_.at(0).kernels->program(dtype, ReduceOp::kSum).blocks);
  }
  unsigned usual() const {
    return static_cast<unsigned>(devices_.at(0).kernels->blocks_that_wait());
  }
  DeviceRanks make(int n, unsigned blocks, std::size_t memory) {
    CHECK(blocks > 0);
    return DeviceRanks(devices_, n, {blocks, PeerMemory::kUsualSlot}, memory, true);
  }
  void check_bits(DeviceRanks& ranks, const Placed& call) {
    call.write(ranks);
    call.launch(ranks);
    ranks.synchronize();
    ranks.check_no_endings();
    call.check(ranks);
  }
  void fill(CUstream stream) {
    OK(driver().cuMemsetD32Async(scratch_, 0, std::min(half_, kMostFilled) / 4, stream));
  }
  // The least that the driver launches.
  void launch_nothing(CUstream stream) {
    OK(driver().cuMemsetD32Async(scratch_ + half_, 0, 1, stream));
  }

  std::string bandwidth(DeviceRanks& ranks, const Programs& programs, const Repeated& arrays,
                        std::size_t bytes) {
    const int n = ranks.size();
    const std::vector<Request> requests = sums_of(ranks, programs, arrays, bytes);
    const CUstream stream = ranks.at(0).stream;
    const std::size_t copied =
        std::min(half_, static_cast<std::size_t>(moved(n, bytes)) / 512 * 256);
    std::vector<double> copies, calls;
    for (int i = -kWarmup; i < plan_.measurements; ++i) {
      spoil_sums(ranks, bytes);
      const auto before = [&] { fill(stream); };
      const double copy = timer_.seconds(stream, before, [&] {
        OK(driver().cuMemcpyAsync(scratch_ + half_, scratch_, copied, stream));
      });
      const double call = timer_.seconds(stream, before, [&] { launch_all(ranks, requests); });
      if (i < 0) continue;
      copies.push_back(copy);
      calls.push_back(call);
    }
    ranks.synchronize();
    ranks.check_no_endings();
    check_sums(ranks, arrays, bytes);
    const double copy = 2.0 * static_cast<double>(copied) / median(copies);
    const double call = moved(n, bytes) / median(calls);
    char line[200];
    std::snprintf(line, sizeof line,
                  "\"bytes_per_s\": %.6g, \"copy_bytes_per_s\": %.6g, \"share_of_copy\": %.4f",
                  call, copy, call / copy);
    return "{" + std::string(line) + "}";
  }

  Devices& devices_;
  const Plan plan_;
  Random random_{1};
  Timer timer_;
  std::vector<double> bare_;
  std::size_t half_ = 0;  // bytes of the scratch
  CUdeviceptr scratch_ = 0;
};

}  // namespace
}  // namespace pycollective::testing

int main(int count, char** arguments) {
  using namespace pycollective::testing;
  Plan plan;
  const auto number = [&](int at) {
    const long value = std::strtol(arguments[at], nullptr, 10);
    CHECK(value > 0);
    return value;
  };
  if (count > 1) plan.rounds = static_cast<int>(number(1));
  if (count > 2) plan.measurements = static_cast<int>(number(2));
  if (count > 3) plan.checked = static_cast<std::size_t>(number(3));
  for (int at = 4; at < count; ++at)
    plan.sizes.push_back(static_cast<std::size_t>(number(at)) << 10);
  if (plan.sizes.empty()) plan.sizes = {std::size_t{64} << 20, std::size_t{256} << 20};

  Devices devices;
  const Current current(devices.at(0).context);
  Bench bench(devices, plan);
  std::string times, bandwidths;
  for (const int n : {2, 4, 8}) {
    char time[40];
    std::snprintf(time, sizeof time, "%s\"%d\": %.3f", n > 2 ? ", " : "", n,
                  bench.one_shot_of(n) * 1e6);
    times += time;
    for (const unsigned blocks : bench.blocks_of(n)) {
      const std::vector<std::string> lines = bench.direct_of(n, blocks);
      for (std::size_t i = 0; i < lines.size(); ++i)
        bandwidths += ", \"direct, " + std::to_string(n) + " ranks of " +
                      std::to_string(plan.sizes[i] >> 10) + " KiB, " + std::to_string(blocks) +
                      " blocks\": " + lines[i];
    }
  }
  std::printf(
      "{\"bare_launch_us\": %.3f, \"one_shot_us\": {%s}%s, \"rounds\": %d, "
      "\"measurements\": %d, \"clock\": \"%s\"}\n",
      bench.bare_launch() * 1e6, times.c_str(), bandwidths.c_str(), plan.rounds, plan.measurements,
      bench.clock());
}
