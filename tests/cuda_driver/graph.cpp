#include "graph.h"

#include "handles.h"

namespace standin {
namespace {

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

CUgraph add_graph(Graph graph) {
  return graphs().add(std::make_shared<const Graph>(std::move(graph)));
}

}  // namespace standin

using namespace standin;

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
