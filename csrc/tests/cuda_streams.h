// Waiting for what is on a stream, of tests whose ranks have one each: never without an end.
#pragma once

#include <chrono>
#include <thread>

#include "tests/cuda_session.h"

namespace pycollective::testing {

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
