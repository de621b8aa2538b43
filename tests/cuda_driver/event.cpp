#include "event.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "handles.h"

namespace standin {
namespace {

Handles<CUevent, Event>& events() {
  static auto* const all = new Handles<CUevent, Event>(3);
  return *all;
}

std::int64_t now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Other processes' streams give no sign but the word itself.
template <class Condition>
void poll(Condition condition) {
  for (std::int64_t pause = 10; !condition(); pause = std::min<std::int64_t>(2 * pause, 200))
    std::this_thread::sleep_for(std::chrono::microseconds(pause));
}

// Records reach their moments in the order of each stream, but streams differ.
void reach(SharedMoment& shared, std::uint64_t number) {
  std::uint64_t seen = shared.reached.load();
  while (seen < number && !shared.reached.compare_exchange_weak(seen, number)) {
  }
}

// What of an event a call waits for: the record before the call, whatever is recorded after.
struct Awaited {
  Ticket ticket;
  SharedMoment* shared = nullptr;
  std::uint64_t number = 0;

  explicit Awaited(const Event& event)
      : ticket(event.recorded),
        shared(event.shared),
        number(event.shared ? event.shared->recorded.load() : 0) {}
  bool done() const { return shared ? shared->reached.load() >= number : ticket.done(); }
};

}  // namespace

Event::~Event() {
  if (mapping) munmap(mapping, 4096);
}

std::shared_ptr<Event> find_event(CUevent handle) { return events().find(handle); }
CUevent add_event(std::shared_ptr<Event> event) { return events().add(std::move(event)); }

void close_events(const Context& context) {
  events().remove_if([&](const Event& event) { return event.context.get() == &context; });
}

}  // namespace standin

using namespace standin;

CUresult cuEventCreate(CUevent* out, unsigned flags) {
  return call(Safety::kSafe, [&](const std::shared_ptr<Context>& context) {
    constexpr unsigned kAll =
        CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS;
    if (!out || (flags & ~kAll) != 0) return CUDA_ERROR_INVALID_VALUE;
    if ((flags & CU_EVENT_INTERPROCESS) && !(flags & CU_EVENT_DISABLE_TIMING))
      return CUDA_ERROR_INVALID_VALUE;
    auto event = std::make_shared<Event>(context, flags);
    if ((flags & CU_EVENT_INTERPROCESS) && !share(*event)) return CUDA_ERROR_OUT_OF_MEMORY;
    *out = add_event(std::move(event));
    return CUDA_SUCCESS;
  });
}

CUresult cuEventDestroy_v2(CUevent handle) {
  return call(Safety::kSafe, [&](const std::shared_ptr<Context>& context) {
    const std::shared_ptr<Event> event = find_event(handle);
    if (!event || event->context != context) return CUDA_ERROR_INVALID_HANDLE;
    events().remove(handle);
    return CUDA_SUCCESS;
  });
}

CUresult cuEventRecord(CUevent handle, CUstream stream_handle) {
  return call(Safety::kSafe, [&](const std::shared_ptr<Context>& context) {
    const std::shared_ptr<Event> event = find_event(handle);
    const std::shared_ptr<Stream> stream = find_stream(context, stream_handle);
    if (!event || event->context != context || !stream) return CUDA_ERROR_INVALID_HANDLE;
    const std::lock_guard lock(event->mutex);
    bool captured = false;
    const CUresult error =
        capture_record(stream, event->captured, event->shared != nullptr, &captured);
    if (error != CUDA_SUCCESS || captured) return error;
    auto time = std::make_shared<std::atomic<std::int64_t>>(0);
    const std::uint64_t number = event->shared ? event->shared->recorded.fetch_add(1) + 1 : 0;
    event->time = time;
    return submit(
        stream,
        [event, time, number](Context&, Random&) {
          *time = now();
          if (event->shared) reach(*event->shared, number);
        },
        &event->recorded);
  });
}

CUresult cuEventQuery(CUevent handle) {
  return call(Safety::kUnsafe, [&](const std::shared_ptr<Context>& context) {
    const std::shared_ptr<Event> event = find_event(handle);
    if (!event || event->context != context) return CUDA_ERROR_INVALID_HANDLE;
    const std::lock_guard lock(event->mutex);
    if (event->captured.capture) return CUDA_ERROR_CAPTURED_EVENT;
    return Awaited(*event).done() ? context->error() : CUDA_ERROR_NOT_READY;
  });
}

CUresult cuEventSynchronize(CUevent handle) {
  return call(Safety::kUnsafe, [&](const std::shared_ptr<Context>& context) {
    const std::shared_ptr<Event> event = find_event(handle);
    if (!event || event->context != context) return CUDA_ERROR_INVALID_HANDLE;
    std::unique_lock lock(event->mutex);
    if (event->captured.capture) return CUDA_ERROR_CAPTURED_EVENT;
    const Awaited awaited(*event);
    lock.unlock();
    if (awaited.shared)
      poll([&] { return awaited.done() || context->error() != CUDA_SUCCESS; });
    else
      awaited.ticket.wait();
    return context->error();
  });
}

CUresult cuEventElapsedTime_v2(float* milliseconds, CUevent first, CUevent second) {
  return call(Safety::kSafe, [&](const std::shared_ptr<Context>& context) {
    const std::shared_ptr<Event> events_of[] = {find_event(first), find_event(second)};
    std::int64_t times[2];
    for (int i = 0; i < 2; ++i) {
      const std::shared_ptr<Event>& event = events_of[i];
      if (!milliseconds) return CUDA_ERROR_INVALID_VALUE;
      if (!event || event->context != context || (event->flags & CU_EVENT_DISABLE_TIMING))
        return CUDA_ERROR_INVALID_HANDLE;
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
    const std::shared_ptr<Event> event = find_event(handle);  // may be another context's
    if (!stream || !event || event->context->destroyed) return CUDA_ERROR_INVALID_HANDLE;
    if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
    const std::lock_guard lock(event->mutex);
    bool captured = false;
    const CUresult error = capture_wait(stream, event->captured, &captured);
    if (error != CUDA_SUCCESS || captured) return error;
    const Awaited awaited(*event);
    if (!awaited.shared) return submit(stream, [](Context&, Random&) {}, nullptr, {awaited.ticket});
    return submit(stream, [event, awaited](Context& its, Random&) {
      poll([&] { return awaited.done() || its.error() != CUDA_SUCCESS; });
    });
  });
}
