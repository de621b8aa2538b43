// The CUDA driver: a library that is opened at run time, when it is first needed, and never linked.
#pragma once

#include <stdexcept>
#include <string>

#include "cuda/driver_api.h"

namespace pycollective::cuda {

// No CUDA here. The message says why, and what would cure it.
class DriverUnavailable : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A call into the driver that failed: "cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY, out of memory".
class DriverError : public std::runtime_error {
 public:
  DriverError(CUresult result, const std::string& message)
      : std::runtime_error(message), result_(result) {}
  CUresult result() const { return result_; }

 private:
  CUresult result_;
};

// The driver's functions, each a member of its name.
struct Driver {
#define PYCOLLECTIVE_CUDA_MEMBER(name, version, parameters) CUresult(*name) parameters = nullptr;
  PYCOLLECTIVE_CUDA_FUNCTIONS(PYCOLLECTIVE_CUDA_MEMBER)
#undef PYCOLLECTIVE_CUDA_MEMBER
  std::string library;  // as it was opened
  int version = 0;      // the CUDA that it is of: 13000 is 13.0
  int devices = 0;      // at least 1
};

// The driver, opened and initialised by the first call that succeeds: libcuda.so.1, or what
// PYCOLLECTIVE_CUDA_DRIVER names. It stays loaded. Throws DriverUnavailable.
const Driver& driver();

// Throws DriverError unless `result`, of `function`, is CUDA_SUCCESS.
void check(CUresult result, const char* function);

// While one lives, `context` is this thread's current one, and no capture of whatever thread
// forbids it calls that touch none of what is captured; the destructor puts the thread's own back,
// or none.
class Current {
 public:
  explicit Current(CUcontext context);
  ~Current();
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

 private:
  CUstreamCaptureMode captures_ = CU_STREAM_CAPTURE_MODE_RELAXED;
};

struct DeviceTraits {
  int ordinal;
  std::string name;
  int major, minor;  // compute capability
  int multiprocessors;
};

DeviceTraits device_traits(int ordinal);

// Whether kernels on the one GPU can reach the other's memory.
bool can_access(int ordinal, int peer);

}  // namespace pycollective::cuda
