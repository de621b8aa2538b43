// What a kernel uses of CUDA: the whole of it, so that the same sources run on the tests' stand-in
// for the driver (tests/cuda_driver/emulation.h), whose threads are fibers.
//
// Waits of a protocol are acquire loads and release stores of single words, never fences.
#pragma once

#if defined(PYCOLLECTIVE_CUDA_EMULATION)

#include "emulation.h"

#define DEVICE static inline
#define UNROLL

#else

#include <cstdint>

// A function of kernels.
#define DEVICE static __device__ __forceinline__
#define UNROLL _Pragma("unroll")

// A kernel. Blocks of up to kMostThreads leave it 128 registers a thread, and that one of them need
// fit a multiprocessor is said because ptxas would else spill to fit three (sm_100).
#define KERNEL(name, Parameters)                                                      \
  extern "C" __global__ void __launch_bounds__(::pycollective::cuda::kMostThreads, 1) \
      name(const __grid_constant__ Parameters p)
#define SHARED(type, name) __shared__ type name

namespace pycollective::cuda {

constexpr int kMostThreads = 512;

DEVICE unsigned thread() { return threadIdx.x; }
DEVICE unsigned threads() { return blockDim.x; }
DEVICE unsigned block() { return blockIdx.x; }
DEVICE unsigned blocks() { return gridDim.x; }

// Where kernels see what the host names: here, the same place.
template <class T>
DEVICE T* visible(T* pointer) {
  return pointer;
}

// System scope: the other side is another GPU, or the host.
DEVICE std::uint32_t load_acquire(const std::uint32_t* word) {
  std::uint32_t value;
  asm volatile("ld.acquire.sys.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

DEVICE void store_release(std::uint32_t* word, std::uint32_t value) {
  asm volatile("st.release.sys.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

// A word that orders nothing, such as the host's abort word.
DEVICE std::uint32_t load_relaxed(const std::uint32_t* word) {
  std::uint32_t value;
  asm volatile("ld.relaxed.sys.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

DEVICE void barrier() { __syncthreads(); }

// A barrier that tells every thread whether any of them says so.
DEVICE bool barrier_or(bool flag) { return __syncthreads_or(flag) != 0; }

// Of a clock that only goes forward; it may stand still for a microsecond.
DEVICE std::uint64_t nanoseconds() {
  std::uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
  return now;
}

DEVICE void pause() { __nanosleep(20); }

}  // namespace pycollective::cuda

#endif
