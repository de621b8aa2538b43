// Events: a moment in a stream.
#include <chrono>

#include "capture.h"
#include "handles.h"

namespace standin {
namespace {

struct Event {
  Event(std::shared_ptr<Context> owner, unsigned its_flags)
      : context(std::move(owner)), flags(its_flags) {}

  const std::shared_ptr<Context> context;
  const unsigned flags;

  std::mutex mutex;  // of the rest
  Ticket recorded;
  std::shared_ptr<std::atomic<std::int64_t>> time;  // nanoseconds, of the record; 0 before it
  CapturedMoment captured;
};

Handles<CUevent, Event>& events() {
  static auto* const all = new Handles<CUevent, Event>(3);
  return *all;
}

// One of this context's, or none.
std::shared_ptr<Event> find_own(const std::shared_ptr<Context>& context, CUevent handle) {
  std::shared_ptr<Event> event = events().find(handle);
  return event && event->context == context ? event : nullptr;
}

std::int64_t now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace
}  // namespace standin

using namespace standin;

CUresult cuEventCreate(CUevent* out, unsigned flags) {
  return call(Safety::kSafe, [&](const std::shared_ptr<Context>& context) {
    if (!out || (flags & ~unsigned{CU_EVENT_DISABLE_TIMING}) != 0) return CUDA_ERROR_INVALID_VALUE;
    *out = events().add(std::make_shared<Event>(context, flags));
    return CUDA_SUCCESS;
  });
}

CUresult cuEventDestroy_v2(CUevent handle) {
  return call(Safety::kSafe, [&](const std::shared_ptr<Context>& context) {
    if (!find_own(context, handle)) return CUDA_ERROR_INVALID_HANDLE;
    events().remove(handle);
    return CUDA_SUCCESS;
  });
}

CUresult cuEventRecord(CUevent handle, CUstream stream_handle) {
  return call(Safety::kSafe, [&](const std::shared_ptr<Context>& context) {
    const std::shared_ptr<Event> event = find_own(context, handle);
    const std::shared_ptr<Stream> stream = find_stream(context, stream_handle);
    if (!event || !stream) return CUDA_ERROR_INVALID_HANDLE;
    const std::lock_guard lock(event->mutex);
    bool captured = false;
    const CUresult error = capture_record(stream, event->captured, &captured);
    if (error != CUDA_SUCCESS || captured) return error;
    auto time = std::make_shared<std::atomic<std::int64_t>>(0);
    event->time = time;
    return submit(stream, [time](Context&, Random&) { *time = now(); }, &event->recorded);
  });
}

CUresult cuEventQuery(CUevent handle) {
  return call(Safety::kUnsafe, [&](const std::shared_ptr<Context>& context) {
    const std::shared_ptr<Event> event = find_own(context, handle);
    if (!event) return CUDA_ERROR_INVALID_HANDLE;
    const std::lock_guard lock(event->mutex);
    if (event->captured.capture) return CUDA_ERROR_CAPTURED_EVENT;
    return event->recorded.done() ? context->error() : CUDA_ERROR_NOT_READY;
  });
}

CUresult cuEventElapsedTime_v2(float* milliseconds, CUevent first, CUevent second) {
  return call(Safety::kSafe, [&](const std::shared_ptr<Context>& context) {
    std::int64_t times[2];
    for (int i = 0; i < 2; ++i) {
      const std::shared_ptr<Event> event = find_own(context, i == 0 ? first : second);
      if (!milliseconds) return CUDA_ERROR_INVALID_VALUE;
      if (!event || (event->flags & CU_EVENT_DISABLE_TIMING)) return CUDA_ERROR_INVALID_HANDLE;
      const std::lock_guard lock(event->mutex);
      if (!event->time) return CUDA_ERROR_INVALID_HANDLE;
      times[i] = *event->time;
      if (times[i] == 0) return CUDA_ERROR_NOT_READY;
    }
    *milliseconds = static_cast<float>(static_cast<double>(times[1] - times[0]) * 1e-6);
    return CUDA_SUCCESS;
  });
}

CUresult cuStreamWaitEvent(CUstream stream_handle, CUevent handle, unsigned flags) {
  return call(Safety::kSafe, [&](const std::shared_ptr<Context>& context) {
    const std::shared_ptr<Stream> stream = find_stream(context, stream_handle);
    const std::shared_ptr<Event> event = events().find(handle);  // may be another context's
    if (!stream || !event) return CUDA_ERROR_INVALID_HANDLE;
    if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
    const std::lock_guard lock(event->mutex);
    bool captured = false;
    const CUresult error = capture_wait(stream, event->captured, &captured);
    if (error != CUDA_SUCCESS || captured) return error;
    return submit(stream, [](Context&, Random&) {}, nullptr, {event->recorded});
  });
}
