#include "capture.h"

#include <algorithm>
#include <atomic>

#include "handles.h"

namespace standin {
namespace {

std::mutex mutex;  // of every capture, and of each stream's and event's part in one
auto& ongoing = *new std::vector<std::shared_ptr<Capture>>();  // outlives the program's end
cuuint64_t captures = 0;                                       // that there ever were
std::atomic<std::size_t> any{0};  // how many are ongoing: most programs never capture

// What this thread lets captures forbid it.
thread_local CUstreamCaptureMode own_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

CUresult spoil(Capture& capture, CUresult code) {
  capture.invalid = true;
  return code;
}

// A blocking stream of the context that captures. The caller holds the mutex.
Capture* blocking_capture(const Context& context) {
  for (const std::shared_ptr<Capture>& capture : ongoing)
    for (const std::shared_ptr<Stream>& stream : capture->streams)
      if (stream->context.get() == &context && stream->blocking) return capture.get();
  return nullptr;
}

// Every node leads to one of the origin's last.
bool joined(const Capture& capture, const std::vector<std::size_t>& tails) {
  const std::vector<Node>& nodes = capture.graph.nodes;
  std::vector<char> reached(nodes.size(), 0);
  for (const std::size_t tail : tails) reached[tail] = 1;
  for (std::size_t i = nodes.size(); i-- > 0;)
    if (reached[i])
      for (const std::size_t before : nodes[i].after) reached[before] = 1;
  return std::all_of(reached.begin(), reached.end(), [](char one) { return one != 0; });
}

struct Executable {
  Graph graph;
  std::mutex mutex;
  Ticket last;  // a graph does not run beside itself
};

Handles<CUgraph, const Graph>& graphs() {
  static auto* const all = new Handles<CUgraph, const Graph>(4);
  return *all;
}
Handles<CUgraphExec, Executable>& executables() {
  static auto* const all = new Handles<CUgraphExec, Executable>(5);
  return *all;
}

// Node after node, in an order drawn from all that the graph allows.
void run(const Graph& graph, Context& context, Random& random) {
  const std::vector<Node>& nodes = graph.nodes;
  std::vector<std::size_t> missing(nodes.size());
  std::vector<std::vector<std::size_t>> next(nodes.size());
  std::vector<std::size_t> ready;
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    missing[i] = nodes[i].after.size();
    for (const std::size_t before : nodes[i].after) next[before].push_back(i);
    if (missing[i] == 0) ready.push_back(i);
  }
  while (!ready.empty() && context.error() == CUDA_SUCCESS) {
    std::swap(ready[random.below(ready.size())], ready.back());
    const std::size_t node = ready.back();
    ready.pop_back();
    nodes[node].work(context, random);
    for (const std::size_t after : next[node])
      if (--missing[after] == 0) ready.push_back(after);
  }
}

}  // namespace

CUresult forbidden_by_capture() {
  if (any == 0 || own_mode == CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_SUCCESS;
  const std::lock_guard lock(mutex);
  CUresult error = CUDA_SUCCESS;
  for (const std::shared_ptr<Capture>& capture : ongoing) {
    const bool own = capture->thread == std::this_thread::get_id();
    if (own ? capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED
            : capture->mode == CU_STREAM_CAPTURE_MODE_GLOBAL &&
                  own_mode == CU_STREAM_CAPTURE_MODE_GLOBAL)
      error = spoil(*capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  }
  return error;
}

CUresult forbidden_while_capturing(const std::shared_ptr<Stream>& stream) {
  if (any == 0) return CUDA_SUCCESS;
  const std::lock_guard lock(mutex);
  if (stream->capture) return spoil(*stream->capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  if (stream->legacy)
    if (Capture* const capture = blocking_capture(*stream->context))
      return spoil(*capture, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
  return CUDA_SUCCESS;
}

CUresult capture_work(const std::shared_ptr<Stream>& stream, Work& work, bool* captured) {
  if (any == 0) return CUDA_SUCCESS;
  const std::lock_guard lock(mutex);
  if (stream->legacy)
    if (Capture* const capture = blocking_capture(*stream->context))
      return spoil(*capture, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
  if (!stream->capture) return CUDA_SUCCESS;
  *captured = true;
  if (stream->capture->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  std::vector<Node>& nodes = stream->capture->graph.nodes;
  nodes.push_back({std::move(work), stream->tails});
  stream->tails = {nodes.size() - 1};
  return CUDA_SUCCESS;
}

CUresult capture_record(const std::shared_ptr<Stream>& stream, CapturedMoment& moment,
                        bool* captured) {
  if (any == 0 && !moment.capture) return CUDA_SUCCESS;
  const std::lock_guard lock(mutex);
  if (!stream->capture) {
    if (stream->legacy)
      if (Capture* const capture = blocking_capture(*stream->context))
        return spoil(*capture, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    moment = {};
    return CUDA_SUCCESS;
  }
  *captured = true;
  if (stream->capture->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  moment = {stream->capture, stream->tails};
  return CUDA_SUCCESS;
}

CUresult capture_wait(const std::shared_ptr<Stream>& stream, const CapturedMoment& moment,
                      bool* captured) {
  if (any == 0 && !moment.capture) return CUDA_SUCCESS;
  const std::lock_guard lock(mutex);
  Capture* const own = stream->capture.get();
  if (stream->legacy)
    if (Capture* const capture = blocking_capture(*stream->context))
      return spoil(*capture, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
  if (own && own->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  if (!moment.capture) return own ? spoil(*own, CUDA_ERROR_STREAM_CAPTURE_ISOLATION) : CUDA_SUCCESS;
  *captured = true;
  if (moment.capture->ended)
    return own ? spoil(*own, CUDA_ERROR_CAPTURED_EVENT) : CUDA_ERROR_CAPTURED_EVENT;
  if (moment.capture->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  if (own && own != moment.capture.get()) {
    spoil(*moment.capture, CUDA_ERROR_STREAM_CAPTURE_MERGE);
    return spoil(*own, CUDA_ERROR_STREAM_CAPTURE_MERGE);
  }
  if (!own) {
    stream->capture = moment.capture;
    stream->tails.clear();
    moment.capture->streams.push_back(stream);
  }
  for (const std::size_t tail : moment.tails)
    if (std::find(stream->tails.begin(), stream->tails.end(), tail) == stream->tails.end())
      stream->tails.push_back(tail);
  return CUDA_SUCCESS;
}

}  // namespace standin

using namespace standin;

CUresult cuStreamBeginCapture_v2(CUstream handle, CUstreamCaptureMode mode) {
  return call(Safety::kSafe, [&](const std::shared_ptr<Context>& context) {
    const std::shared_ptr<Stream> stream = find_stream(context, handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if (stream->legacy) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    const std::lock_guard lock(mutex);
    if (stream->capture) return CUDA_ERROR_INVALID_VALUE;
    auto capture = std::make_shared<Capture>();
    capture->number = ++captures;
    capture->mode = mode;
    capture->thread = std::this_thread::get_id();
    capture->origin = stream.get();
    capture->graph.context = context;
    capture->streams = {stream};
    stream->capture = capture;
    stream->tails.clear();
    ongoing.push_back(std::move(capture));
    any = ongoing.size();
    return CUDA_SUCCESS;
  });
}

CUresult cuStreamEndCapture(CUstream handle, CUgraph* out) {
  return call(Safety::kSafe, [&](const std::shared_ptr<Context>& context) {
    const std::shared_ptr<Stream> stream = find_stream(context, handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if (!out) return CUDA_ERROR_INVALID_VALUE;
    *out = nullptr;
    std::shared_ptr<Capture> capture;
    {
      const std::lock_guard lock(mutex);
      capture = stream->capture;
      if (!capture) return CUDA_ERROR_INVALID_VALUE;
      if (capture->origin != stream.get())
        return spoil(*capture, CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
      if (capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED &&
          capture->thread != std::this_thread::get_id())
        return spoil(*capture, CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
      const bool whole = joined(*capture, stream->tails);
      capture->ended = true;
      for (const std::shared_ptr<Stream>& one : capture->streams) {
        one->capture.reset();
        one->tails.clear();
      }
      capture->streams.clear();
      ongoing.erase(std::find(ongoing.begin(), ongoing.end(), capture));
      any = ongoing.size();
      if (capture->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
      if (!whole) return CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
    }
    *out = graphs().add(std::make_shared<const Graph>(std::move(capture->graph)));
    return CUDA_SUCCESS;
  });
}

CUresult cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus* status) {
  return cuStreamGetCaptureInfo_v2(handle, status, nullptr, nullptr, nullptr, nullptr);
}

CUresult cuStreamGetCaptureInfo_v2(CUstream handle, CUstreamCaptureStatus* status,
                                   cuuint64_t* number, CUgraph* graph,
                                   const CUgraphNode** dependencies, size_t* dependency_count) {
  return call(Safety::kSafe, [&](const std::shared_ptr<Context>& context) {
    const std::shared_ptr<Stream> stream = find_stream(context, handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if (!status) return CUDA_ERROR_INVALID_VALUE;
    if (graph || dependencies || dependency_count) return CUDA_ERROR_NOT_SUPPORTED;
    const std::lock_guard lock(mutex);
    // As cuda.h has it: of the legacy stream it cannot be said beside a capture.
    if (stream->legacy && blocking_capture(*context)) return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    *status = !stream->capture           ? CU_STREAM_CAPTURE_STATUS_NONE
              : stream->capture->invalid ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
                                         : CU_STREAM_CAPTURE_STATUS_ACTIVE;
    if (number && *status == CU_STREAM_CAPTURE_STATUS_ACTIVE) *number = stream->capture->number;
    return CUDA_SUCCESS;
  });
}

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  if (!mode || *mode < CU_STREAM_CAPTURE_MODE_GLOBAL || *mode > CU_STREAM_CAPTURE_MODE_RELAXED)
    return CUDA_ERROR_INVALID_VALUE;
  std::swap(*mode, own_mode);
  return CUDA_SUCCESS;
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec* out, CUgraph handle, unsigned long long flags) {
  return call(Safety::kSafe, [&](const std::shared_ptr<Context>&) {
    const std::shared_ptr<const Graph> graph = graphs().find(handle);
    if (!out || !graph || flags != 0) return CUDA_ERROR_INVALID_VALUE;
    auto executable = std::make_shared<Executable>();
    executable->graph = *graph;
    *out = executables().add(std::move(executable));
    return CUDA_SUCCESS;
  });
}

CUresult cuGraphLaunch(CUgraphExec handle, CUstream stream_handle) {
  return call(Safety::kSafe, [&](const std::shared_ptr<Context>& context) {
    const std::shared_ptr<Executable> executable = executables().find(handle);
    const std::shared_ptr<Stream> stream = find_stream(context, stream_handle);
    if (!executable) return CUDA_ERROR_INVALID_VALUE;
    if (!stream || executable->graph.context != context) return CUDA_ERROR_INVALID_HANDLE;
    if (const CUresult error = forbidden_while_capturing(stream)) return error;
    const std::lock_guard lock(executable->mutex);
    return submit(
        stream, [executable](Context& its, Random& random) { run(executable->graph, its, random); },
        &executable->last, {executable->last});
  });
}

CUresult cuGraphExecDestroy(CUgraphExec handle) {
  return call(Safety::kSafe, [&](const std::shared_ptr<Context>&) {
    return executables().remove(handle) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
  });
}

CUresult cuGraphDestroy(CUgraph handle) {
  return call(Safety::kSafe, [&](const std::shared_ptr<Context>&) {
    return graphs().remove(handle) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
  });
}
