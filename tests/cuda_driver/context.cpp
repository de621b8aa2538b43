#include "context.h"

#include <pthread.h>

#include <array>
#include <cstdio>

#include "capture.h"
#include "faults.h"
#include "handles.h"
#include "memory.h"
#include "settings.h"
#include "stream.h"

namespace standin {
namespace {

enum State { kNot, kInitialised, kForked };
std::atomic<State> state{kNot};

struct Primary {
  std::mutex mutex;
  std::shared_ptr<Context> context;
};

Primary& primary(int device) {
  static auto* const all = new std::array<Primary, 64>();
  return (*all)[static_cast<std::size_t>(device)];
}

Handles<CUcontext, Context>& contexts() {
  static auto* const all = new Handles<CUcontext, Context>(1);
  return *all;
}

std::vector<CUcontext>& stack() {
  thread_local std::vector<CUcontext> stack;
  return stack;
}

}  // namespace

void Context::fail(CUresult code, const char* what) {
  int none = CUDA_SUCCESS;
  if (sticky.compare_exchange_strong(none, code))
    std::fprintf(stderr, "stand-in for the CUDA driver: device %d: %s\n", device, what);
}

void fail_contexts(CUresult code, const char* what) {
  for (std::size_t device = 0; device < settings().devices.size(); ++device) {
    Primary& its = primary(static_cast<int>(device));
    const std::lock_guard lock(its.mutex);
    if (its.context) its.context->fail(code, what);
  }
}

bool valid_device(CUdevice device) {
  return device >= 0 && static_cast<std::size_t>(device) < settings().devices.size();
}

std::shared_ptr<Context> find_context(CUcontext handle) { return contexts().find(handle); }

CUresult initialised() {
  // A child of fork() has none of the threads, and no driver that was begun before it.
  return state.load(std::memory_order_acquire) == kInitialised ? CUDA_SUCCESS
                                                               : CUDA_ERROR_NOT_INITIALIZED;
}

CUresult begin_call(Safety safety, std::shared_ptr<Context>& context) {
  if (const CUresult error = initialised()) return error;
  if (stack().empty()) return CUDA_ERROR_INVALID_CONTEXT;
  context = contexts().find(stack().back());
  if (const CUresult error = context->error()) return error;
  return safety == Safety::kUnsafe ? forbidden_by_capture() : CUDA_SUCCESS;
}

}  // namespace standin

using namespace standin;

CUresult cuInit(unsigned flags) {
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  if (state == kForked) return CUDA_ERROR_NOT_INITIALIZED;
  if (settings().devices.empty()) return CUDA_ERROR_NO_DEVICE;
  static const bool reserved = [] {
    pthread_atfork(before_fork, after_fork_in_parent, [] {
      if (state == kInitialised) state = kForked;
      after_fork_in_child();
    });
    name_faults();
    return reserve_addresses();
  }();
  if (!reserved) return CUDA_ERROR_OUT_OF_MEMORY;
  state.store(kInitialised, std::memory_order_release);
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* out, CUdevice device) {
  if (const CUresult error = initialised()) return error;
  if (!out) return CUDA_ERROR_INVALID_VALUE;
  if (!valid_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  Primary& its = primary(device);
  const std::lock_guard lock(its.mutex);
  if (!its.context) {
    its.context = std::make_shared<Context>(device);
    its.context->handle = contexts().add(its.context);
    open_legacy_stream(its.context);
  }
  *out = its.context->handle;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext* out) {
  if (const CUresult error = initialised()) return error;
  if (!out) return CUDA_ERROR_INVALID_VALUE;
  *out = stack().empty() ? nullptr : stack().back();
  return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent_v2(CUcontext context) {
  if (const CUresult error = initialised()) return error;
  if (!contexts().find(context)) return CUDA_ERROR_INVALID_CONTEXT;
  stack().push_back(context);
  return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent_v2(CUcontext* out) {
  if (const CUresult error = initialised()) return error;
  if (stack().empty()) return CUDA_ERROR_INVALID_CONTEXT;
  if (out) *out = stack().back();
  stack().pop_back();
  return CUDA_SUCCESS;
}

CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned flags) {
  return call(Safety::kSafe, [&](const std::shared_ptr<Context>& context) {
    if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
    const std::shared_ptr<Context> other = contexts().find(peer);
    if (!other || other == context) return CUDA_ERROR_INVALID_CONTEXT;
    if (!settings().peers) return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
    const std::uint64_t bit = std::uint64_t{1} << other->device;
    return (context->peers.fetch_or(bit) & bit) ? CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED
                                                : CUDA_SUCCESS;
  });
}
