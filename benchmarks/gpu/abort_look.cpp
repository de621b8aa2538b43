// What it costs that waits in kernels look at the abort word once a millisecond: small all-reduces
// by the library's kernels, and by the same without that look.
//
//   abort_look IMAGES [rounds, 500] [MiB that are filled before a call, 512]
//
// IMAGES: a folder with the modules' images, compiled with PYCOLLECTIVE_ABORT_EVERY=0
// (benchmarks.gpu.images). Run in csrc/tests, where the programs are. Ranks of one process share a
// GPU, a stream each; 4 Ki float32. One-shot: the time of the last rank to come, for which the
// others' kernels wait. Ring, which waits 14 times: from the first rank's begin to the last's end.
// In turn, and in each turn the library's kernels twice, loaded twice, so that what differs between
// these two is noise. Prints a line of JSON: medians, in microseconds.
#include <cstdio>
#include <cstdlib>
#include <string>

#include "peer_calls.h"

namespace pycollective::testing {
namespace {

constexpr std::size_t kCount = 4096;  // elements
constexpr int kWarmup = 20;
constexpr const char* kImages = "PYCOLLECTIVE_CUDA_IMAGES";

std::unique_ptr<cuda::Kernels> kernels_of(const char* folder) {
  const char* const usual = std::getenv(kImages);
  const std::string before = usual != nullptr ? usual : "";
  if (folder != nullptr) CHECK(setenv(kImages, folder, 1) == 0);
  auto kernels =
      std::make_unique<cuda::Kernels>(cuda::device_traits(0), std::vector<std::string>());
  CHECK((usual != nullptr ? setenv(kImages, before.c_str(), 1) : unsetenv(kImages)) == 0);
  return kernels;
}

// The library's, those without the look, and the library's once more.
enum Variant { kLooks, kDoesNot, kLooksToo, kVariants };

class Measurement {
 public:
  Measurement(Devices& devices, const char* images, int rounds, std::size_t filled)
      : devices_(devices), rounds_(rounds), filled_(filled) {
    for (const char* folder :
         {static_cast<const char*>(nullptr), images, static_cast<const char*>(nullptr)})
      kernels_.push_back(kernels_of(folder));
    OK(driver().cuMemAlloc(&scratch_, filled_));
  }
  ~Measurement() { OK(driver().cuMemFree(scratch_)); }
  Measurement(const Measurement&) = delete;
  Measurement& operator=(const Measurement&) = delete;

  const char* clock() const { return timer_.clock(); }

  // A member of JSON.
  std::string of(const char* algorithm, int n) {
    const bool is_one_shot = std::string(algorithm) == "one-shot";
    const Programs programs =
        is_one_shot ? one_shot(n) : programs_of(algorithm, OpKind::kAllReduce, n);
    const Placed call(call_of(programs, Dtype::kFloat32, kCount), 0, random_);
    std::vector<std::unique_ptr<DeviceRanks>> groups;
    for (const auto& kernels : kernels_) groups.push_back(group(n, *kernels));
    for (const auto& ranks : groups) {
      call.write(*ranks);
      call.launch(*ranks);
      ranks->synchronize();
    }
    std::vector<double> times[kVariants];
    for (int i = -kWarmup; i < rounds_; ++i)
      for (int turn = 0; turn < kVariants; ++turn) {
        const int v = (turn + i + kWarmup) % kVariants;  // each is first as often
        if (i + 1 == rounds_) call.write(*groups[v]);    // what is compared, of this call alone
        const double took = is_one_shot ? last_of(*groups[v], call) : all_of(*groups[v], call);
        if (i >= 0) times[v].push_back(1e6 * took);
      }
    for (const auto& ranks : groups) {
      ranks->check_no_endings();
      call.check(*ranks);
    }
    const double with = median(times[kLooks]), without = median(times[kDoesNot]);
    const double again = median(times[kLooksToo]);
    char line[200];
    std::snprintf(line, sizeof line,
                  "\"%s, %d ranks\": {\"us\": %.3f, \"without_us\": %.3f, \"look_us\": %.3f, "
                  "\"noise_us\": %.3f}",
                  algorithm, n, with, without, with - without, with - again);
    return line;
  }

 private:
  std::unique_ptr<DeviceRanks> group(int n, cuda::Kernels& kernels) {
    // What DeviceRanks takes its kernels from; it keeps none of it but them.
    std::unique_ptr<cuda::Kernels>& taken = devices_.at(0).kernels;
    std::unique_ptr<cuda::Kernels> usual = std::move(taken);
    taken.reset(&kernels);
    const int fit = kernels.program(Dtype::kFloat32, ReduceOp::kSum).blocks;
    const int blocks = std::max(std::min(kernels.blocks_that_wait(), fit / n), 1);
    auto ranks = std::make_unique<DeviceRanks>(
        devices_, n, cuda::MailboxShape{static_cast<unsigned>(blocks), PeerMemory::kUsualSlot},
        std::size_t{1} << 16, true);
    static_cast<void>(taken.release());
    taken = std::move(usual);
    return ranks;
  }
  void fill(CUstream stream) { OK(driver().cuMemsetD32Async(scratch_, 0, filled_ / 4, stream)); }
  double last_of(DeviceRanks& ranks, const Placed& call) {
    const int last = ranks.size() - 1;
    const auto others = [&] {
      for (int r = 0; r < last; ++r) call.launch(ranks.at(r), r, kLongestWait);
      fill(ranks.at(last).stream);
    };
    const double took = timer_.seconds(ranks.at(last).stream, others,
                                       [&] { call.launch(ranks.at(last), last, kLongestWait); });
    ranks.synchronize();
    return took;
  }
  double all_of(DeviceRanks& ranks, const Placed& call) {
    std::vector<Request> requests;
    for (int r = 0; r < ranks.size(); ++r) requests.push_back(call.request(ranks.at(r), r));
    const CUstream first = ranks.at(0).stream;
    const double took =
        timer_.seconds(first, [&] { fill(first); }, [&] { launch_all(ranks, requests); });
    ranks.synchronize();
    return took;
  }

  Devices& devices_;
  const int rounds_;
  const std::size_t filled_;  // bytes
  Random random_{1};
  Timer timer_;
  CUdeviceptr scratch_ = 0;
  std::vector<std::unique_ptr<cuda::Kernels>> kernels_;
};

}  // namespace
}  // namespace pycollective::testing

int main(int count, char** arguments) {
  using namespace pycollective::testing;
  CHECK(count > 1);
  const int rounds = count > 2 ? std::atoi(arguments[2]) : 500;
  const long filled = count > 3 ? std::atol(arguments[3]) : 512;
  CHECK(rounds > 0 && filled > 0);
  Devices devices;
  const Current current(devices.at(0).context);
  Measurement measurement(devices, arguments[1], rounds, static_cast<std::size_t>(filled) << 20);
  std::string json;
  for (const int n : {2, 4, 8}) json += measurement.of("one-shot", n) + ", ";
  json += measurement.of("ring", 8);
  std::printf("{%s, \"rounds\": %d, \"clock\": \"%s\"}\n", json.c_str(), rounds,
              measurement.clock());
  return 0;
}
