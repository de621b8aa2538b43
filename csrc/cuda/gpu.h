// One GPU as this process uses it: its primary context, and what calls borrow of it.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include "cuda/driver.h"

namespace pycollective::cuda {

// Memory of the host that copies reach without a detour, from the pool of its GPU.
struct Pinned {
  std::byte* data = nullptr;
  std::size_t bytes = 0;  // that there are, at least as many as were asked for
};

// A stream of the library's own, which waits for nobody's but what it is told to, and an event.
struct Lane {
  CUstream stream = nullptr;
  CUevent event = nullptr;
};

// The GPU on which this memory is. Throws std::invalid_argument where
// it is no device's, DriverUnavailable, DriverError.
int device_of(const void* data);

// Thread-safe. Kept until the process ends: what is freed, the driver frees only once the whole GPU
// has come to rest, and beside a kernel that waits for a peer that is never.
class Gpu {
 public:
  // The GPU of this number, as CUDA counts; made when first asked for. Throws std::invalid_argument
  // where there is none, DriverUnavailable, DriverError.
  static Gpu& at(int ordinal);

  const DeviceTraits& traits() const { return traits_; }
  CUcontext context() const { return context_; }

  // To be given back once nothing uses them any more. The context is current.
  Lane take_lane();
  Pinned take_pinned(std::size_t bytes);
  void give_back(const Lane& lane, const std::vector<Pinned>& pinned);
  // The same once what was handed over to the lane's stream before its event has been done.
  void give_back_later(const Lane& lane, const std::vector<Pinned>& pinned);

 private:
  explicit Gpu(int ordinal);
  void sweep();  // under the lock

  struct Late {
    Lane lane;
    std::vector<Pinned> pinned;
  };

  DeviceTraits traits_;
  CUcontext context_ = nullptr;
  std::mutex mutex_;
  std::vector<Lane> lanes_;
  std::vector<Pinned> pinned_;
  std::vector<Late> late_;
};

}  // namespace pycollective::cuda
