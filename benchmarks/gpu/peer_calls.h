// All-reduces that the benchmarks of kernels measure: their arrays, programs, launches and sums;
// and how long they take.
#pragma once

#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <vector>

#include "tests/device_calls.h"

namespace pycollective::testing {

// Large arrays whose sums tell orders apart, and what must come of them: a block of such numbers
// again and again, of which the CPU adds up one.
class Repeated {
 public:
  // Of `n` arrays of bfloat16, none longer than so many bytes.
  Repeated(int n, std::size_t bytes, Random& random)
      : block_(2 * std::min(kMostElements, bytes / 2)), sums_(block_) {
    std::vector<const void*> leaves;
    for (int leaf = 0; leaf < n; ++leaf) {
      Data numbers(block_);
      for (std::size_t at = 0; at < block_; at += 2)
        write_element(traits_of(Dtype::kBFloat16), numbers.data() + at, random);
      leaves_.push_back(std::move(numbers));
      leaves.push_back(leaves_.back().data());
    }
    const FloatEnvironment ieee;
    find_kernels(Dtype::kBFloat16, ReduceOp::kSum, active_simd_level())
        .reduce(leaves.data(), n, n, sums_.data(), nullptr, block_ / 2);
  }

  // Array `leaf`, of so many bytes. They are there when it returns.
  void write(CUdeviceptr to, int leaf, std::size_t bytes, CUstream stream) const {
    const Data& numbers = leaves_[static_cast<std::size_t>(leaf)];
    std::size_t written = std::min(block_, bytes);
    OK(driver().cuMemcpyAsync(to, reinterpret_cast<CUdeviceptr>(numbers.data()), written, stream));
    for (std::size_t more = 0; written < bytes; written += more) {
      more = std::min(written, bytes - written);
      OK(driver().cuMemcpyAsync(to + written, to, more, stream));
    }
    OK(driver().cuStreamSynchronize(stream));
  }

  // That these are the arrays' sums.
  void check_sums(const Data& got) const {
    for (std::size_t at = 0; at < got.size(); at += block_)
      CHECK(std::memcmp(got.data() + at, sums_.data(), std::min(block_, got.size() - at)) == 0);
  }

 private:
  // A prime, so that no other piece of an array is the same as one.
  static constexpr std::size_t kMostElements = 1'048'573;
  std::size_t block_;  // bytes
  std::vector<Data> leaves_;
  Data sums_;
};

// Times what is put on a stream of the context that is current while it lives: by the driver's
// events, or by the host's clock where it has none that measure (the core's table has no clock).
class Timer {
 public:
  Timer() {
    void* const library = dlopen(driver().library.c_str(), RTLD_NOW | RTLD_NOLOAD);
    if (library != nullptr)
      elapsed_ = reinterpret_cast<Elapsed>(dlsym(library, "cuEventElapsedTime"));
    for (cuda::CUevent& event : events_) OK(driver().cuEventCreate(&event, 0));
  }
  ~Timer() {
    for (const cuda::CUevent event : events_) OK(driver().cuEventDestroy(event));
  }
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;
  const char* clock() const { return elapsed_ != nullptr ? "events" : "host"; }

  // Of what `act` puts on the stream, after what `prepare` has put there, which is not timed: where
  // that keeps the stream busy, the host's time for `act` is not either.
  template <class Prepare, class Act>
  double seconds(CUstream stream, const Prepare& prepare, const Act& act) {
    OK(driver().cuStreamSynchronize(stream));
    prepare();
    const auto start = std::chrono::steady_clock::now();
    OK(driver().cuEventRecord(events_[0], stream));
    act();
    OK(driver().cuEventRecord(events_[1], stream));
    OK(driver().cuStreamSynchronize(stream));
    const auto end = std::chrono::steady_clock::now();
    if (elapsed_ == nullptr) return std::chrono::duration<double>(end - start).count();
    float milliseconds = 0;
    OK(elapsed_(&milliseconds, events_[0], events_[1]));
    return milliseconds / 1e3;
  }
  template <class Act>
  double seconds(CUstream stream, const Act& act) {
    return seconds(stream, [] {}, act);
  }

 private:
  using Elapsed = cuda::CUresult (*)(float*, cuda::CUevent, cuda::CUevent);
  Elapsed elapsed_ = nullptr;
  cuda::CUevent events_[2] = {};
};

inline double median(std::vector<double> samples) {
  CHECK(!samples.empty());
  std::sort(samples.begin(), samples.end());
  return samples[samples.size() / 2];
}

constexpr std::uint64_t kLongestWait = 10'000'000'000;  // nanoseconds

inline Call call_of(Programs programs, Dtype dtype, std::size_t count) {
  Call call;
  call.programs = std::move(programs);
  call.dtype = dtype;
  call.count = count;
  return call;
}

// What a call by "direct" reads and writes on all ranks, each having so many bytes.
inline double moved(int ranks, std::size_t bytes) {
  const double n = ranks;
  return n * static_cast<double>(bytes) * (3 + 2 * (n - 1) / n);
}

// Calls that add up these arrays of so many bytes of a rank; results lie behind them.
inline std::vector<Request> sums_of(DeviceRanks& ranks, const Programs& programs,
                                    const Repeated& arrays, std::size_t bytes) {
  std::vector<Request> requests;
  for (int r = 0; r < ranks.size(); ++r) {
    const Rank& rank = ranks.at(r);
    Request request;
    request.kind = OpKind::kAllReduce;
    request.dtype = Dtype::kBFloat16;
    request.reduce_op = ReduceOp::kSum;
    request.root = programs[0]->root;
    request.count = bytes / 2;
    request.program = programs[static_cast<std::size_t>(r)];
    request.input = reinterpret_cast<void*>(rank.memory);
    request.output = reinterpret_cast<void*>(rank.memory + bytes);
    requests.push_back(request);
    arrays.write(rank.memory, r, bytes, rank.stream);
  }
  return requests;
}

// So that what is compared is what the next call makes.
inline void spoil_sums(DeviceRanks& ranks, std::size_t bytes) {
  for (int r = 0; r < ranks.size(); ++r) {
    const Rank& rank = ranks.at(r);
    OK(driver().cuMemsetD32Async(rank.memory + bytes, ~0U, bytes / 4, rank.stream));
  }
  ranks.synchronize();
}

// All begin at one place of the first rank's stream, and it goes on once all have ended.
inline void launch_all(DeviceRanks& ranks, const std::vector<Request>& requests) {
  const CUstream first = ranks.at(0).stream;
  cuda::CUevent event = nullptr;
  OK(driver().cuEventCreate(&event, cuda::CU_EVENT_DISABLE_TIMING));
  OK(driver().cuEventRecord(event, first));
  for (int r = 1; r < ranks.size(); ++r)
    OK(driver().cuStreamWaitEvent(ranks.at(r).stream, event, 0));
  for (int r = 0; r < ranks.size(); ++r)
    ranks.at(r).peers->launch(Task(requests[static_cast<std::size_t>(r)]), ranks.at(r).stream,
                              kLongestWait);
  for (int r = 1; r < ranks.size(); ++r) {
    OK(driver().cuEventRecord(event, ranks.at(r).stream));
    OK(driver().cuStreamWaitEvent(first, event, 0));
  }
  OK(driver().cuEventDestroy(event));
}

inline void check_sums(DeviceRanks& ranks, const Repeated& arrays, std::size_t bytes) {
  for (int r = 0; r < ranks.size(); ++r) arrays.check_sums(ranks.at(r).read(bytes, bytes));
}

}  // namespace pycollective::testing
