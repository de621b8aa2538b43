// What most tests begin with: a context that is current, the test kernels, memory.
#pragma once

#include "test_driver.h"

namespace standin::testing {

namespace kernels = pycollective::cuda::testing;

constexpr unsigned char kFatbin[] = {0x50, 0xed, 0x55, 0xba, 0, 0, 0, 0};

struct Session {
  explicit Session(int device = 0) {
    OK(cu().cuInit(0));
    OK(cu().cuDevicePrimaryCtxRetain(&context, device));
    OK(cu().cuCtxPushCurrent(context));
    OK(cu().cuModuleLoadDataEx(&module, kFatbin, 0, nullptr, nullptr));
  }
  CUfunction function(const char* name) const {
    CUfunction found = nullptr;
    OK(cu().cuModuleGetFunction(&found, module, name));
    return found;
  }
  CUcontext context = nullptr;
  CUmodule module = nullptr;
};

inline CUdeviceptr device_words(std::size_t words) {
  CUdeviceptr address = 0;
  OK(cu().cuMemAlloc(&address, 4 * words));
  return address;
}

inline CUstream new_stream(unsigned flags = CU_STREAM_NON_BLOCKING) {
  CUstream stream = nullptr;
  OK(cu().cuStreamCreate(&stream, flags));
  return stream;
}

inline CUevent new_event(unsigned flags = 0) {
  CUevent event = nullptr;
  OK(cu().cuEventCreate(&event, flags));
  return event;
}

template <class T = std::uint32_t>
T* at(CUdeviceptr address) {
  return reinterpret_cast<T*>(address);
}

template <class Parameters>
CUresult launch(CUfunction function, Parameters parameters, unsigned blocks, unsigned threads,
                CUstream stream) {
  void* all[] = {&parameters};
  return cu().cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, 0, stream, all, nullptr);
}

// The words, by way of pinned memory.
inline std::vector<std::uint32_t> read(CUdeviceptr from, std::size_t words, CUstream stream) {
  std::vector<std::uint32_t> to(words);
  OK(cu().cuMemcpyDtoHAsync(to.data(), from, 4 * words, stream));
  OK(cu().cuStreamSynchronize(stream));
  return to;
}

// Holds back a stream until the host opens it.
struct Gate {
  explicit Gate(const Session& session) : wait(session.function("test_wait")) {
    void* host = nullptr;
    OK(cu().cuMemHostAlloc(&host, 4, 0));
    word = static_cast<std::uint32_t*>(host);
    *word = 0;
    OK(cu().cuMemHostGetDevicePointer(&address, host, 0));
  }
  void hold(CUstream stream) const {
    OK(launch(wait, kernels::Wait{at(address), 1, nullptr}, 1, 1, stream));
  }
  void open() const { __atomic_store_n(word, 1, __ATOMIC_RELEASE); }
  CUfunction wait;
  std::uint32_t* word = nullptr;
  CUdeviceptr address = 0;
};

// Long enough that what wrongly does not wait has gone on.
inline void let_others_go_on() { std::this_thread::sleep_for(std::chrono::milliseconds(50)); }

}  // namespace standin::testing
