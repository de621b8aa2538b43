// What tests of CUDA code begin with: calls of the driver, which is the stand-in or a real one
// (PYCOLLECTIVE_CUDA_DRIVER says which), and waits for what is on a stream, never without an end.
#pragma once

#include <chrono>
#include <thread>

#include "cuda/driver.h"
#include "tests/check.h"

namespace pycollective::testing {

#define OK(call) ::pycollective::cuda::check(call, #call)

using cuda::CUdeviceptr;
using cuda::Current;
using cuda::CUstream;
using cuda::driver;

constexpr double kLongest = 150;  // seconds

// Nothing is on the stream any more; its context is current.
inline bool is_idle(CUstream stream) {
  const cuda::CUresult now = driver().cuStreamQuery(stream);
  if (now != cuda::CUDA_ERROR_NOT_READY) OK(now);
  return now == cuda::CUDA_SUCCESS;
}

inline bool is_idle_in(CUstream stream, double seconds) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (!is_idle(stream)) {
    if (std::chrono::steady_clock::now() >= end) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  return true;
}

}  // namespace pycollective::testing
