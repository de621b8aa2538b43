// One of the two ranks of a litmus loop: its area, its kernel, a stream.
#pragma once

#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "litmus_parameters.h"
#include "tests/cuda_streams.h"

namespace pycollective::testing {

using Flags = cuda::Flags;

// What is handed over, and how.
struct Shape {
  unsigned slots;
  Flags flags;
};

struct Counted {
  std::uint64_t exchanges = 0, stale = 0, overwritten = 0, late = 0;
  Counted& operator+=(const Counted& other) {
    exchanges += other.exchanges;
    stale += other.stale;
    overwritten += other.overwritten;
    late += other.late;
    return *this;
  }
};

class Side {
 public:
  static constexpr std::uint64_t kLongestWait = 20'000'000'000;  // nanoseconds

  Side(int device, const std::string& image) {
    cuda::CUdevice handle = 0;
    OK(driver().cuDeviceGet(&handle, device));
    OK(driver().cuDevicePrimaryCtxRetain(&context_, handle));
    const Current current(context_);
    std::ifstream file(image, std::ios::binary);
    CHECK(file);
    const std::string bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    OK(driver().cuModuleLoadDataEx(&module_, bytes.data(), 0, nullptr, nullptr));
    OK(driver().cuModuleGetFunction(&function_, module_, "litmus_exchange"));
    int most = 0, fit = 0;
    OK(driver().cuFuncGetAttribute(&most, cuda::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK,
                                   function_));
    threads_ = static_cast<unsigned>(std::min(most, 512));
    OK(driver().cuOccupancyMaxActiveBlocksPerMultiprocessor(&fit, function_,
                                                            static_cast<int>(threads_), 0));
    const int quarter = fit * cuda::device_traits(device).multiprocessors / 4;
    blocks_ = static_cast<unsigned>(std::clamp(quarter, 1, 32));
    OK(driver().cuStreamCreate(&stream_, cuda::CU_STREAM_NON_BLOCKING));
    OK(driver().cuMemAlloc(&area_, kArea));
    OK(driver().cuMemAlloc(&counts_, counts_bytes()));
    CHECK(cuda::litmus_slot_at(blocks_, blocks_, 2, 0, threads_) <= kArea);
  }
  ~Side() {
    const Current current(context_);
    CHECK(is_idle_in(stream_, kLongest));
    OK(driver().cuStreamDestroy(stream_));
    OK(driver().cuMemFree(area_));
    OK(driver().cuMemFree(counts_));
    OK(driver().cuModuleUnload(module_));
  }
  Side(const Side&) = delete;
  Side& operator=(const Side&) = delete;

  cuda::CUcontext context() const { return context_; }
  CUdeviceptr area() const { return area_; }
  unsigned threads() const { return threads_; }

  // Nothing has been exchanged. Done when it returns: then the other may begin.
  void clear() {
    const Current current(context_);
    first_ = 0;
    OK(driver().cuMemsetD32Async(area_, 0, kArea / 4, stream_));
    OK(driver().cuMemsetD32Async(counts_, 0, counts_bytes() / 4, stream_));
    OK(driver().cuStreamSynchronize(stream_));
  }
  // So many exchanges more of each block; `other`: its area, as this context maps it. One of the
  // two lingers.
  void launch(CUdeviceptr other, const Shape& shape, unsigned exchanges, bool lingers) {
    const Current current(context_);
    cuda::LitmusParameters p{};
    p.mine = reinterpret_cast<void*>(area_);
    p.other = reinterpret_cast<void*>(other);
    p.counts = reinterpret_cast<cuda::LitmusCount*>(counts_);
    p.first = first_;
    p.exchanges = exchanges;
    p.words = threads_;
    p.slots = shape.slots;
    p.nanoseconds = kLongestWait;
    p.flags = shape.flags;
    p.lingers = lingers;
    first_ += exchanges;
    void* all[] = {&p};
    OK(driver().cuLaunchKernel(function_, blocks_, 1, 1, threads_, 1, 1, 0, stream_, all, nullptr));
  }
  // Of all launches since clear(), which have ended.
  Counted counted() const {
    const Current current(context_);
    CHECK(is_idle_in(stream_, kLongest));
    std::vector<cuda::LitmusCount> counts(std::size_t{blocks_} * threads_);
    OK(driver().cuMemcpyAsync(reinterpret_cast<CUdeviceptr>(counts.data()), counts_, counts_bytes(),
                              stream_));
    OK(driver().cuStreamSynchronize(stream_));
    Counted sum;
    for (const cuda::LitmusCount& each : counts)
      sum += {each.exchanges, each.stale, each.overwritten, each.late};
    return sum;
  }

 private:
  static constexpr std::size_t kArea = std::size_t{2} << 20;  // a peer maps nothing else with it
  std::size_t counts_bytes() const {
    return std::size_t{blocks_} * threads_ * sizeof(cuda::LitmusCount);
  }

  cuda::CUcontext context_ = nullptr;
  cuda::CUmodule module_ = nullptr;
  cuda::CUfunction function_ = nullptr;
  unsigned threads_ = 0, blocks_ = 0, first_ = 0;
  CUstream stream_ = nullptr;
  CUdeviceptr area_ = 0, counts_ = 0;
};

}  // namespace pycollective::testing
