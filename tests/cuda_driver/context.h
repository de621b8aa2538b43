// Contexts: each device's primary one, which is current on which thread, and their sticky errors.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "exports.h"

namespace standin {

class Stream;

struct Context {
  explicit Context(int ordinal) : device(ordinal) {}

  // The first error of a kernel: every later call gives it. Says it on stderr, too.
  void fail(CUresult code, const char* what);
  CUresult error() const { return static_cast<CUresult>(sticky.load(std::memory_order_acquire)); }
  bool reaches(int other_device) const {
    return other_device == device || ((peers.load() >> other_device) & 1) != 0;
  }

  const int device;  // ordinal
  CUcontext handle = nullptr;
  std::atomic<int> sticky{CUDA_SUCCESS};
  std::atomic<std::uint64_t> peers{0};  // devices whose contexts it was given access to

  std::mutex order;  // held while work is queued: what the legacy stream waits for is one moment's
  std::shared_ptr<Stream> legacy;                // guarded by order, as the next
  std::vector<std::shared_ptr<Stream>> streams;  // but the legacy one
};

// All of the process's contexts fail so.
void fail_contexts(CUresult code, const char* what);

// What capture says of a call: see capture.h.
enum class Safety { kSafe, kUnsafe };

// What every call but those of devices and contexts begins with: initialised, not forked, a
// current context that has no error, and no capture that forbids it.
CUresult begin_call(Safety safety, std::shared_ptr<Context>& context);

template <class Body>
CUresult call(Safety safety, Body body) {
  std::shared_ptr<Context> context;
  const CUresult error = begin_call(safety, context);
  return error == CUDA_SUCCESS ? body(context) : error;
}

// The same without a context: initialised, and not forked since.
CUresult initialised();

bool valid_device(CUdevice device);
std::shared_ptr<Context> find_context(CUcontext handle);

}  // namespace standin
