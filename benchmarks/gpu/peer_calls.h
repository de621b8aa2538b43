// All-reduces that the benchmarks of kernels measure: their programs, bytes, launches and sums.
#pragma once

#include "repeated.h"
#include "tests/device_calls.h"

namespace pycollective::testing {

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
                                    const cuda::Repeated& arrays, std::size_t bytes) {
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

inline void check_sums(DeviceRanks& ranks, const cuda::Repeated& arrays, std::size_t bytes) {
  for (int r = 0; r < ranks.size(); ++r) arrays.check_sums(ranks.at(r).read(bytes, bytes));
}

}  // namespace pycollective::testing
