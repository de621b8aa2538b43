#include "torch/backend.h"

#include <torch/csrc/utils/pythoncapi_compat.h>

#include <optional>
#include <utility>

#include "bindings/gil.h"
#include "torch/checks.h"
#include "torch/errors.h"
#include "torch/work.h"

namespace pycollective::shim {

using WorkPointer = c10::intrusive_ptr<c10d::Work>;
using Tensors = std::vector<at::Tensor>;
using c10d::OpType;

namespace {

std::chrono::milliseconds milliseconds(double seconds) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(
      std::chrono::duration<double>(seconds));
}

// Calls `act` with the request and what keeps its memory; copies the request only if need be.
template <class Act>
void with_keep(const Request& request, const std::shared_ptr<const void>& keep, const Act& act) {
  if (!keep) return act(request);
  Request copy = request;
  copy.keep = keep;
  act(copy);
}

}  // namespace

Backend::Backend(std::shared_ptr<Collectives> collectives,
                 std::shared_ptr<CompletionThreads> threads, pybind11::object owner)
    : c10d::Backend(collectives->rank(), collectives->size()),
      collectives_(std::move(collectives)),
      threads_(std::move(threads)),
      owner_(std::move(owner)) {
  init();
}

Backend::~Backend() {
  // While the interpreter finalizes no Python object may be touched: leak it.
  if (!Py_IsInitialized() || Py_IsFinalizing()) {
    owner_.release();
    return;
  }
  const GilHeld gil;
  owner_ = {};
}

c10::intrusive_ptr<Backend::Options> Backend::getBackendOptions() {
  return c10::make_intrusive<Options>(getBackendName(), milliseconds(collectives_->timeout()));
}

void Backend::setTimeout(std::chrono::milliseconds timeout) {
  TORCH_CHECK_VALUE(timeout.count() > 0, "the timeout must be positive, not ", timeout.count(),
                    " ms");
  collectives_->set_timeout(std::chrono::duration<double>(timeout).count());
}

c10d::ErrorType Backend::getError() {
  const std::shared_ptr<const Failure> failure = collectives_->failure();
  if (!failure) return c10d::ErrorType::SUCCESS;
  return failure->kind == FailureKind::kTimeout ? c10d::ErrorType::TIMEOUT
                                                : c10d::ErrorType::COMM_ERROR;
}

void Backend::abort() { collectives_->abort("the process group was aborted"); }

void Backend::shutdown() {
  {
    const GilHeld gil;
    owner_.attr("close")();  // Python's close(): Ctrl-C ends it
  }
  std::optional<GilReleased> unlocked;  // callbacks may need it
  if (PyGILState_Check()) unlocked.emplace();
  threads_->close(milliseconds(collectives_->timeout()));
}

void Backend::carry_out(Transfer& transfer) {
  const std::shared_ptr<const void> keep = transfer.keep(*collectives_, threads_);
  typed([&](const InterruptHook& interrupted) {
    for (const Request& request : transfer.requests())
      with_keep(request, keep, [&](const Request& each) { collectives_->run(each, interrupted); });
  });
  transfer.copy_back();
}

c10::intrusive_ptr<c10d::Work> Backend::issue(c10d::OpType type, Transfer transfer, bool async) {
  const std::uint64_t sequence = ++sequence_;
  if (!async) {
    const auto profile = transfer.profile();
    carry_out(transfer);
    return c10::make_intrusive<Work>(rank_, type, sequence,
                                     AsyncCall::finished(std::move(transfer)),
                                     std::vector<std::shared_ptr<pycollective::Work>>());
  }
  const std::shared_ptr<AsyncCall> call = AsyncCall::start(std::move(transfer), threads_);
  std::vector<std::shared_ptr<pycollective::Work>> cores;
  cores.reserve(call->transfer().requests().size());
  const std::shared_ptr<const void> keep = call->transfer().keep(*collectives_, threads_);
  typed([&](const InterruptHook&) {
    for (const Request& request : call->transfer().requests())
      with_keep(request, keep, [&](const Request& each) {
        cores.push_back(collectives_->submit(each, call->on_done()));
      });
  });
  return c10::make_intrusive<Work>(rank_, type, sequence, call, std::move(cores));
}

// The c10d operations.

WorkPointer Backend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  if (tensors.size() == 1 && tensors.front().is_sparse()) return allreduce_sparse(tensors, opts);
  Transfer transfer(OpKind::kAllReduce, "pycollective:all_reduce", opts.timeout);
  const at::Tensor& tensor = only(transfer.name(), tensors);
  transfer.reduce_by(opts.reduceOp);
  void* data = transfer.update(tensor);
  transfer.add(data, data, tensor.scalar_type(), tensor.numel());
  return issue(OpType::ALLREDUCE, std::move(transfer), opts.asyncOp);
}

WorkPointer Backend::allreduce_coalesced(Tensors& tensors,
                                         const c10d::AllreduceCoalescedOptions& opts) {
  Transfer transfer(OpKind::kAllReduce, "pycollective:all_reduce_coalesced", opts.timeout);
  transfer.reduce_by(opts.reduceOp);
  for (const at::Tensor& tensor : tensors) check_tensor(transfer.name(), tensor);
  for (const at::Tensor& tensor : tensors) {
    void* data = transfer.update(tensor);
    transfer.add(data, data, tensor.scalar_type(), tensor.numel());
  }
  return issue(OpType::ALLREDUCE_COALESCED, std::move(transfer), opts.asyncOp);
}

WorkPointer Backend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  Transfer transfer(OpKind::kBroadcast, "pycollective:broadcast", opts.timeout);
  const at::Tensor& tensor = only(transfer.name(), tensors);
  check_rank(transfer.name(), opts.rootRank, size_);
  transfer.root(opts.rootRank);
  void* data = transfer.update(tensor);
  transfer.add(data, data, tensor.scalar_type(), tensor.numel());
  return issue(OpType::BROADCAST, std::move(transfer), opts.asyncOp);
}

WorkPointer Backend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  Transfer transfer(OpKind::kReduce, "pycollective:reduce", opts.timeout);
  const at::Tensor& tensor = only(transfer.name(), tensors);
  check_rank(transfer.name(), opts.rootRank, size_);
  transfer.root(opts.rootRank);
  transfer.reduce_by(opts.reduceOp);
  if (rank_ == opts.rootRank) {
    void* data = transfer.update(tensor);
    transfer.add(data, data, tensor.scalar_type(), tensor.numel());
  } else {
    transfer.add(transfer.read(tensor), nullptr, tensor.scalar_type(), tensor.numel());
  }
  return issue(OpType::REDUCE, std::move(transfer), opts.asyncOp);
}

WorkPointer Backend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                               const c10d::AllgatherOptions& opts) {
  Transfer transfer(OpKind::kAllGather, "pycollective:all_gather", opts.timeout);
  const at::Tensor& input = only(transfer.name(), inputs);
  const Tensors& shards = one_a_rank(transfer.name(), outputs, size_, input);
  const void* from = transfer.read(input);
  transfer.add(from, transfer.write(shards), input.scalar_type(), input.numel());
  return issue(OpType::ALLGATHER, std::move(transfer), opts.asyncOp);
}

WorkPointer Backend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                     const c10d::AllgatherOptions& opts) {
  Transfer transfer(OpKind::kAllGather, "pycollective:all_gather_into_tensor", opts.timeout);
  check_shards(transfer.name(), output, input, size_);
  const void* from = transfer.read(input);
  transfer.add(from, transfer.write(output), input.scalar_type(), input.numel());
  return issue(OpType::_ALLGATHER_BASE, std::move(transfer), opts.asyncOp);
}

WorkPointer Backend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                     const c10d::AllgatherOptions& opts) {
  Transfer transfer(OpKind::kAllGather, "pycollective:all_gather_into_tensor_coalesced",
                    opts.timeout);
  check_pairs(transfer.name(), outputs, inputs);
  for (std::size_t i = 0; i < inputs.size(); ++i)
    check_shards(transfer.name(), outputs[i], inputs[i], size_);
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const void* from = transfer.read(inputs[i]);
    transfer.add(from, transfer.write(outputs[i]), inputs[i].scalar_type(), inputs[i].numel());
  }
  return issue(OpType::ALLGATHER_COALESCED, std::move(transfer), opts.asyncOp);
}

WorkPointer Backend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                         const c10d::AllgatherOptions& opts) {
  Transfer transfer(OpKind::kAllGather, "pycollective:all_gather_coalesced", opts.timeout);
  check_coalesced(transfer.name(), outputs, inputs, size_);
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    Tensors shards;
    for (const Tensors& of_rank : outputs) shards.push_back(of_rank[i]);
    const void* from = transfer.read(inputs[i]);
    transfer.add(from, transfer.write(shards), inputs[i].scalar_type(), inputs[i].numel());
  }
  return issue(OpType::ALLGATHER_COALESCED, std::move(transfer), opts.asyncOp);
}

WorkPointer Backend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                    const c10d::ReduceScatterOptions& opts) {
  Transfer transfer(OpKind::kReduceScatter, "pycollective:reduce_scatter", opts.timeout);
  const at::Tensor& output = only(transfer.name(), outputs);
  const Tensors& shards = one_a_rank(transfer.name(), inputs, size_, output);
  transfer.reduce_by(opts.reduceOp);
  const void* from = transfer.read(shards);
  transfer.add(from, transfer.write(output), output.scalar_type(), output.numel());
  return issue(OpType::REDUCE_SCATTER, std::move(transfer), opts.asyncOp);
}

WorkPointer Backend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                          const c10d::ReduceScatterOptions& opts) {
  Transfer transfer(OpKind::kReduceScatter, "pycollective:reduce_scatter_tensor", opts.timeout);
  check_shards(transfer.name(), input, output, size_);
  transfer.reduce_by(opts.reduceOp);
  const void* from = transfer.read(input);
  transfer.add(from, transfer.write(output), output.scalar_type(), output.numel());
  return issue(OpType::_REDUCE_SCATTER_BASE, std::move(transfer), opts.asyncOp);
}

WorkPointer Backend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                     const c10d::ReduceScatterOptions& opts) {
  Transfer transfer(OpKind::kReduceScatter, "pycollective:reduce_scatter_tensor_coalesced",
                    opts.timeout);
  check_pairs(transfer.name(), outputs, inputs);
  for (std::size_t i = 0; i < inputs.size(); ++i)
    check_shards(transfer.name(), inputs[i], outputs[i], size_);
  transfer.reduce_by(opts.reduceOp);
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const void* from = transfer.read(inputs[i]);
    transfer.add(from, transfer.write(outputs[i]), outputs[i].scalar_type(), outputs[i].numel());
  }
  return issue(OpType::COALESCED, std::move(transfer), opts.asyncOp);
}

WorkPointer Backend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                            const c10d::GatherOptions& opts) {
  Transfer transfer(OpKind::kGather, "pycollective:gather", opts.timeout);
  const at::Tensor& input = only(transfer.name(), inputs);
  check_rank(transfer.name(), opts.rootRank, size_);
  transfer.root(opts.rootRank);
  const void* from = transfer.read(input);
  void* to = nullptr;
  if (rank_ == opts.rootRank)
    to = transfer.write(one_a_rank(transfer.name(), outputs, size_, input));
  transfer.add(from, to, input.scalar_type(), input.numel());
  return issue(OpType::GATHER, std::move(transfer), opts.asyncOp);
}

WorkPointer Backend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                             const c10d::ScatterOptions& opts) {
  Transfer transfer(OpKind::kScatter, "pycollective:scatter", opts.timeout);
  const at::Tensor& output = only(transfer.name(), outputs);
  check_rank(transfer.name(), opts.rootRank, size_);
  transfer.root(opts.rootRank);
  const void* from = nullptr;
  if (rank_ == opts.rootRank)
    from = transfer.read(one_a_rank(transfer.name(), inputs, size_, output));
  transfer.add(from, transfer.write(output), output.scalar_type(), output.numel());
  return issue(OpType::SCATTER, std::move(transfer), opts.asyncOp);
}

WorkPointer Backend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                   std::vector<std::int64_t>& output_splits,
                                   std::vector<std::int64_t>& input_splits,
                                   const c10d::AllToAllOptions& opts) {
  Transfer transfer(OpKind::kAllToAll, "pycollective:all_to_all_single", opts.timeout);
  // A rank knows its own splits alone. So the ranks go by whether splits are given at all.
  if (!output_splits.empty() || !input_splits.empty()) {
    check_dtypes(transfer.name(), output, input);
    const auto sent = check_splits(transfer.name(), "input", input, input_splits, size_);
    const auto expected = check_splits(transfer.name(), "output", output, output_splits, size_);
    const auto* from =
        static_cast<const std::byte*>(transfer.read_apart({input}, {output}).front());
    auto* to = static_cast<std::byte*>(transfer.write(output));
    std::vector<AllToAllVPart> parts(sent.size());
    for (std::size_t i = 0; i < parts.size(); ++i) {
      parts[i] = {from, static_cast<std::size_t>(sent[i]), to,
                  static_cast<std::size_t>(expected[i])};
      from += sent[i] * input.element_size();
      to += expected[i] * input.element_size();
    }
    transfer.add_all_to_all_v(std::move(parts), input.scalar_type());
    return issue(OpType::ALLTOALL_BASE, std::move(transfer), opts.asyncOp);
  }
  check_equal_splits(transfer.name(), output, size_);
  check_equal_splits(transfer.name(), input, size_);
  check_shards(transfer.name(), output, input, 1);
  const void* from = transfer.read(input);
  transfer.add(from, transfer.write(output), input.scalar_type(), input.numel() / size_);
  return issue(OpType::ALLTOALL_BASE, std::move(transfer), opts.asyncOp);
}

WorkPointer Backend::alltoall(Tensors& outputs, Tensors& inputs,
                              const c10d::AllToAllOptions& opts) {
  Transfer transfer(OpKind::kAllToAll, "pycollective:all_to_all", opts.timeout);
  check_list(transfer.name(), inputs, size_);
  check_list(transfer.name(), outputs, size_);
  const at::Tensor& like = inputs.front();
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    check_dtypes(transfer.name(), outputs[i], inputs[i]);
    check_dtypes(transfer.name(), like, inputs[i]);
  }
  const std::vector<const void*> from = transfer.read_apart(inputs, outputs);
  std::vector<AllToAllVPart> parts(inputs.size());
  for (std::size_t i = 0; i < parts.size(); ++i) {
    parts[i].input = from[i];
    parts[i].send_count = static_cast<std::size_t>(inputs[i].numel());
    parts[i].output = transfer.write(outputs[i]);
    parts[i].recv_count = static_cast<std::size_t>(outputs[i].numel());
  }
  transfer.add_all_to_all_v(std::move(parts), like.scalar_type());
  return issue(OpType::ALLTOALL, std::move(transfer), opts.asyncOp);
}

WorkPointer Backend::send(Tensors& tensors, int destination, int tag) {
  Transfer transfer(OpKind::kSend, "pycollective:send", c10d::kUnsetTimeout);
  const at::Tensor& tensor = only(transfer.name(), tensors);
  check_rank(transfer.name(), destination, size_);
  check_tag(transfer.name(), tag);
  transfer.root(destination);
  transfer.tag(tag);
  transfer.add(transfer.read(tensor), nullptr, tensor.scalar_type(), tensor.numel());
  return issue(OpType::SEND, std::move(transfer), true);
}

WorkPointer Backend::recv(Tensors& tensors, int source, int tag) {
  check_rank("recv", source, size_);
  return receive(OpType::RECV, tensors, source, tag);
}

WorkPointer Backend::recvAnysource(Tensors& tensors, int tag) {
  return receive(OpType::RECVANYSOURCE, tensors, kAnySource, tag);
}

WorkPointer Backend::receive(OpType type, Tensors& tensors, int source, int tag) {
  const bool any = source == kAnySource;
  Transfer transfer(OpKind::kRecv, any ? "pycollective:recvAnySource" : "pycollective:recv",
                    c10d::kUnsetTimeout);
  const at::Tensor& tensor = only(transfer.name(), tensors);
  check_tag(transfer.name(), tag);
  transfer.root(source);
  transfer.tag(tag);
  transfer.add(nullptr, transfer.write(tensor), tensor.scalar_type(), tensor.numel());
  return issue(type, std::move(transfer), true);
}

WorkPointer Backend::barrier(const c10d::BarrierOptions& opts) {
  Transfer transfer(OpKind::kBarrier, "pycollective:barrier", opts.timeout);
  transfer.add(nullptr, nullptr, at::kByte, 0);
  return issue(OpType::BARRIER, std::move(transfer), opts.asyncOp);
}

}  // namespace pycollective::shim
