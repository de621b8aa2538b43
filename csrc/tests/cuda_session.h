// What a test of CUDA code begins with: a context that is current, the kernels, a stream, memory.
// The driver is the stand-in, or a real one: PYCOLLECTIVE_CUDA_DRIVER says which.
#pragma once

#include <cstddef>
#include <vector>

#include "cuda/driver.h"
#include "cuda/kernels.h"
#include "tests/check.h"

namespace pycollective::cuda {

#define OK(call) check(call, #call)

// Of device 0.
class Session {
 public:
  Session() : context_(retain()), current_(context_), kernels_(device_traits(0), {}) {
    OK(driver().cuStreamCreate(&stream_, CU_STREAM_NON_BLOCKING));
  }
  ~Session() { OK(driver().cuStreamDestroy(stream_)); }
  const Kernels& kernels() const { return kernels_; }
  CUstream stream() const { return stream_; }
  void synchronize() const { OK(driver().cuStreamSynchronize(stream_)); }

 private:
  static CUcontext retain() {
    CUdevice device = 0;
    CUcontext context = nullptr;
    OK(driver().cuDeviceGet(&device, 0));
    OK(driver().cuDevicePrimaryCtxRetain(&context, device));
    return context;
  }
  CUcontext context_;
  Current current_;
  Kernels kernels_;
  CUstream stream_ = nullptr;
};

// `size` bytes of the device, from an address that is a multiple of 256.
class DeviceMemory {
 public:
  DeviceMemory(const Session& session, std::size_t size) : session_(session), size_(size) {
    OK(driver().cuMemAlloc(&address_, size));
    CHECK(address_ % 256 == 0);
  }
  ~DeviceMemory() { OK(driver().cuMemFree(address_)); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  // Never to be looked at on the host.
  void* at(std::size_t offset) const { return reinterpret_cast<void*>(address_ + offset); }

  void write(const std::vector<std::byte>& bytes) {
    CHECK(bytes.size() <= size_);
    const auto from = reinterpret_cast<CUdeviceptr>(bytes.data());
    OK(driver().cuMemcpyAsync(address_, from, bytes.size(), session_.stream()));
    session_.synchronize();
  }
  std::vector<std::byte> read(std::size_t size) const {
    std::vector<std::byte> bytes(size);
    const auto to = reinterpret_cast<CUdeviceptr>(bytes.data());
    OK(driver().cuMemcpyAsync(to, address_, size, session_.stream()));
    session_.synchronize();
    return bytes;
  }

 private:
  const Session& session_;
  std::size_t size_;
  CUdeviceptr address_ = 0;
};

}  // namespace pycollective::cuda
