// Times what is put on a stream: by the driver's events, or by the host's clock where it has none
// that measure (the table of the core has no clock).
#pragma once

#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <vector>

#include "tests/cuda_session.h"

namespace pycollective::cuda {

// Of the context that is current while it lives.
class Timer {
 public:
  Timer() {
    void* const library = dlopen(driver().library.c_str(), RTLD_NOW | RTLD_NOLOAD);
    if (library != nullptr)
      elapsed_ = reinterpret_cast<Elapsed>(dlsym(library, "cuEventElapsedTime"));
    for (CUevent& event : events_) OK(driver().cuEventCreate(&event, 0));
  }
  ~Timer() {
    for (const CUevent event : events_) OK(driver().cuEventDestroy(event));
  }
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;
  const char* clock() const { return elapsed_ != nullptr ? "events" : "host"; }

  // Of what `act` puts on the stream, after what `prepare` has put there, which is not timed: where
  // that keeps the stream busy, the host's time for `act` is not either.
  template <class Prepare, class Act>
  double seconds(CUstream stream, const Prepare& prepare, const Act& act) {
    OK(driver().cuStreamSynchronize(stream));
    prepare();
    const auto start = std::chrono::steady_clock::now();
    OK(driver().cuEventRecord(events_[0], stream));
    act();
    OK(driver().cuEventRecord(events_[1], stream));
    OK(driver().cuStreamSynchronize(stream));
    const auto end = std::chrono::steady_clock::now();
    if (elapsed_ == nullptr) return std::chrono::duration<double>(end - start).count();
    float milliseconds = 0;
    OK(elapsed_(&milliseconds, events_[0], events_[1]));
    return milliseconds / 1e3;
  }
  template <class Act>
  double seconds(CUstream stream, const Act& act) {
    return seconds(stream, [] {}, act);
  }

 private:
  using Elapsed = CUresult (*)(float*, CUevent, CUevent);
  Elapsed elapsed_ = nullptr;
  CUevent events_[2] = {};
};

inline double median(std::vector<double> samples) {
  CHECK(!samples.empty());
  std::sort(samples.begin(), samples.end());
  return samples[samples.size() / 2];
}

}  // namespace pycollective::cuda
