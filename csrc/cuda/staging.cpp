#include "cuda/staging.h"

#include <chrono>
#include <stdexcept>
#include <thread>

namespace pycollective::cuda {
namespace {

using Clock = std::chrono::steady_clock;

// Nothing is before it on its stream: only a GPU that hangs takes so long.
constexpr std::chrono::seconds kLongestCopy{10};
constexpr std::chrono::microseconds kBetweenLooks{50};

CUdeviceptr address(const void* pointer) { return reinterpret_cast<CUdeviceptr>(pointer); }

void refuse_capture(CUstream stream) {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  const CUresult result = driver().cuStreamIsCapturing(stream, &status);
  if (result != CUDA_ERROR_STREAM_CAPTURE_IMPLICIT) check(result, "cuStreamIsCapturing");
  if (result == CUDA_SUCCESS && status == CU_STREAM_CAPTURE_STATUS_NONE) return;
  throw std::invalid_argument(
      "the call's stream is being captured, and arrays that go by way of the host cannot be: a "
      "graph would have to run the host's part again. Make the call outside of the graph");
}

}  // namespace

Staging::Staging(Gpu& gpu, CUstream stream, const void* input, const Sizes& sizes)
    : gpu_(gpu), sizes_(sizes) {
  const Current current(gpu.context());
  refuse_capture(stream);
  try {
    input_ = gpu.take_pinned(sizes.input);
    if (!sizes.in_place) output_ = gpu.take_pinned(sizes.output);
    lane_ = gpu.take_lane();
    // Bound to now: the event serves again at once.
    check(driver().cuEventRecord(lane_.event, stream), "cuEventRecord");
    check(driver().cuStreamWaitEvent(lane_.stream, lane_.event, 0), "cuStreamWaitEvent");
    copy(address(input_.data), address(input), sizes.input);
  } catch (...) {
    // Nothing of ours was handed over, or all that was has failed with the context.
    gpu.give_back(lane_, {input_, output_});
    throw;
  }
}

Staging::~Staging() {
  try {
    if (copies_out_)
      for (const auto until = Clock::now() + kLongestCopy; !done() && Clock::now() < until;)
        std::this_thread::sleep_for(kBetweenLooks);
  } catch (const DriverError&) {
    // The context has failed, and every copy with it.
  }
  if (under_way_)
    gpu_.give_back_later(lane_, {input_, output_});
  else
    gpu_.give_back(lane_, {input_, output_});
}

void Staging::copy(CUdeviceptr to, CUdeviceptr from, std::size_t bytes) {
  if (bytes == 0) return;
  check(driver().cuMemcpyAsync(to, from, bytes, lane_.stream), "cuMemcpyAsync");
  under_way_ = true;
  check(driver().cuEventRecord(lane_.event, lane_.stream), "cuEventRecord");
}

bool Staging::done() {
  if (!under_way_) return true;
  const Current current(gpu_.context());
  const CUresult result = driver().cuEventQuery(lane_.event);
  if (result == CUDA_ERROR_NOT_READY) return false;
  under_way_ = false;
  check(result, "cuEventQuery");
  return true;
}

void Staging::copy_out(void* to) {
  const Current current(gpu_.context());
  copies_out_ = true;
  copy(address(to), address(output()), sizes_.output);
}

}  // namespace pycollective::cuda
