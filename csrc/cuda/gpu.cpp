#include "cuda/gpu.h"

#include <algorithm>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>

#include "per_process.h"

namespace pycollective::cuda {
namespace {

constexpr std::size_t kSmallestPinned = std::size_t{64} << 10;

// Few sizes, so that blocks serve again; at most a quarter more than was asked for.
std::size_t rounded(std::size_t bytes) {
  std::size_t size = kSmallestPinned;
  while (size < bytes) {
    if (const std::size_t step = size / 4; size >= 4 * kSmallestPinned)
      for (int quarter = 1; quarter < 4; ++quarter)
        if (size + static_cast<std::size_t>(quarter) * step >= bytes)
          return size + static_cast<std::size_t>(quarter) * step;
    size *= 2;
  }
  return size;
}

}  // namespace

int device_of(const void* data) {
  const Driver& cuda = driver();
  int ordinal = -1;
  unsigned type = 0;
  // Whoever made the array has a context here, most likely; a new one costs memory of its GPU.
  CUcontext context = nullptr;
  check(cuda.cuCtxGetCurrent(&context), "cuCtxGetCurrent");
  const Current current(context != nullptr ? context : Gpu::at(0).context());
  CUpointer_attribute attributes[] = {CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
                                      CU_POINTER_ATTRIBUTE_MEMORY_TYPE};
  void* answers[] = {&ordinal, &type};
  check(cuda.cuPointerGetAttributes(2, attributes, answers, reinterpret_cast<CUdeviceptr>(data)),
        "cuPointerGetAttributes");
  if (type != CU_MEMORYTYPE_DEVICE || ordinal < 0)
    throw std::invalid_argument("its memory is no GPU's");
  return ordinal;
}

Gpu& Gpu::at(int ordinal) {
  struct Gpus {
    std::mutex mutex;
    std::map<int, std::unique_ptr<Gpu>> by_ordinal;
  };
  static PerProcess<Gpus> gpus;
  const int devices = driver().devices;
  if (ordinal < 0 || ordinal >= devices)
    throw std::invalid_argument("there is no GPU " + std::to_string(ordinal) +
                                "; this process has " + std::to_string(devices));
  const std::lock_guard lock(gpus->mutex);
  std::unique_ptr<Gpu>& gpu = gpus->by_ordinal[ordinal];
  if (!gpu) gpu.reset(new Gpu(ordinal));
  return *gpu;
}

Gpu::Gpu(int ordinal) : traits_(device_traits(ordinal)) {
  CUdevice device = 0;
  check(driver().cuDeviceGet(&device, ordinal), "cuDeviceGet");
  check(driver().cuDevicePrimaryCtxRetain(&context_, device), "cuDevicePrimaryCtxRetain");
}

Lane Gpu::take_lane() {
  {
    const std::lock_guard lock(mutex_);
    sweep();
    if (!lanes_.empty()) {
      const Lane lane = lanes_.back();
      lanes_.pop_back();
      return lane;
    }
  }
  Lane lane;
  check(driver().cuStreamCreate(&lane.stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
  const CUresult result = driver().cuEventCreate(&lane.event, CU_EVENT_DISABLE_TIMING);
  if (result != CUDA_SUCCESS) static_cast<void>(driver().cuStreamDestroy(lane.stream));
  check(result, "cuEventCreate");
  return lane;
}

Pinned Gpu::take_pinned(std::size_t bytes) {
  if (bytes == 0) return {};
  {
    const std::lock_guard lock(mutex_);
    sweep();
    // The smallest that will do, and wastes no more than as much again.
    auto best = pinned_.end();
    for (auto each = pinned_.begin(); each != pinned_.end(); ++each)
      if (each->bytes >= bytes && (best == pinned_.end() || each->bytes < best->bytes)) best = each;
    if (best != pinned_.end() && best->bytes <= 2 * std::max(bytes, kSmallestPinned)) {
      const Pinned found = *best;
      pinned_.erase(best);
      return found;
    }
  }
  const std::size_t size = rounded(bytes);
  void* data = nullptr;
  check(driver().cuMemHostAlloc(&data, size, CU_MEMHOSTALLOC_PORTABLE), "cuMemHostAlloc");
  return {static_cast<std::byte*>(data), size};
}

void Gpu::give_back(const Lane& lane, const std::vector<Pinned>& pinned) {
  const std::lock_guard lock(mutex_);
  if (lane.stream != nullptr) lanes_.push_back(lane);
  for (const Pinned& each : pinned)
    if (each.data != nullptr) pinned_.push_back(each);
}

void Gpu::give_back_later(const Lane& lane, const std::vector<Pinned>& pinned) {
  const std::lock_guard lock(mutex_);
  late_.push_back({lane, pinned});
}

void Gpu::sweep() {
  const auto done = [](const Late& each) {
    return driver().cuEventQuery(each.lane.event) != CUDA_ERROR_NOT_READY;
  };
  for (std::size_t i = 0; i < late_.size();) {
    if (!done(late_[i])) {
      ++i;
      continue;
    }
    lanes_.push_back(late_[i].lane);
    for (const Pinned& each : late_[i].pinned)
      if (each.data != nullptr) pinned_.push_back(each);
    late_.erase(late_.begin() + static_cast<std::ptrdiff_t>(i));
  }
}

}  // namespace pycollective::cuda
