#include "torch/backend.h"

#include <c10/core/InferenceMode.h>
#include <torch/csrc/utils/pythoncapi_compat.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <limits>
#include <optional>
#include <sstream>
#include <utility>

#include "bindings/gil.h"
#include "engine/waiting_time.h"
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

// Ends the carrier's group though what is in it has failed: it takes no calls for ever otherwise.
void end_quietly(c10d::Backend& carrier) {
  try {
    carrier.endCoalescing();
  } catch (...) {  // the first error is raised
  }
}

}  // namespace

Backend::Backend(std::shared_ptr<Collectives> collectives,
                 std::shared_ptr<CompletionThreads> threads, pybind11::object owner,
                 pybind11::object device_side)
    : c10d::Backend(collectives->rank(), collectives->size()),
      collectives_(std::move(collectives)),
      threads_(std::move(threads)),
      owner_(std::move(owner)),
      device_side_(std::move(device_side)) {
  init();
}

c10::intrusive_ptr<Backend::Options> Backend::getBackendOptions() {
  return c10::make_intrusive<Options>(getBackendName(), milliseconds(collectives_->timeout()));
}

void Backend::setTimeout(std::chrono::milliseconds timeout) {
  TORCH_CHECK_VALUE(timeout.count() > 0, "the timeout must be positive, not ", timeout.count(),
                    " ms");
  const double seconds = std::chrono::duration<double>(timeout).count();
  collectives_->set_timeout(seconds);
  device_side_.set_timeout(seconds);
}

c10d::ErrorType Backend::getError() {
  const std::shared_ptr<const Failure> failure = collectives_->failure();
  if (!failure) {
    const DeviceSide::Carrier carrier = device_side_.made(getBoundDeviceId());
    return carrier ? carrier->getError() : c10d::ErrorType::SUCCESS;
  }
  return failure->kind == FailureKind::kTimeout ? c10d::ErrorType::TIMEOUT
                                                : c10d::ErrorType::COMM_ERROR;
}

bool Backend::supportsTensorAlloc(c10::DeviceIndex device) {
  if (device < 0) return true;  // the CPU has no index
  const DeviceSide::Carrier carrier = device_side_.made(getBoundDeviceId());
  return carrier && carrier->supportsTensorAlloc(device);
}

at::Tensor Backend::allocateTensor(long size, at::TensorOptions options) {
  TORCH_CHECK_VALUE(size >= 0 && size <= std::numeric_limits<long>::max() / 16,
                    "a tensor cannot have ", size, " elements");
  if (!options.device().is_cpu())
    return device_side_.carrier(getBoundDeviceId())->allocateTensor(size, options);
  const std::size_t bytes = static_cast<std::size_t>(size) * options.dtype().itemsize();
  const std::shared_ptr<std::byte> memory =
      typed([&](const InterruptHook&) { return collectives_->allocate(bytes); });
  return at::from_blob(memory.get(), {size}, [memory](void*) {}, options);
}

void Backend::abort() {
  collectives_->abort("the process group was aborted");
  device_side_.abort();
}

void Backend::shutdown() {
  {
    const GilHeld gil;
    owner_.get().attr("close")();  // Python's close(): Ctrl-C ends it
  }
  device_side_.shutdown();
  std::optional<GilReleased> unlocked;  // callbacks may need it
  if (PyGILState_Check()) unlocked.emplace();
  threads_->close(milliseconds(collectives_->timeout()));
}

void Backend::startCoalescing() {
  std::optional<Coalesced> left;  // goes without the lock, since works of Python's take the GIL
  const std::lock_guard lock(coalescing_);
  left.swap(coalesced_);  // so that the next one begins
  TORCH_CHECK(!left, "blocks of coalesced calls cannot be nested. ", kLeft);
  coalesced_.emplace();
}

c10::intrusive_ptr<c10d::Work> Backend::endCoalescing() {
  std::optional<Coalesced> all;
  {
    const std::lock_guard lock(coalescing_);
    all.swap(coalesced_);
  }
  TORCH_CHECK(all, "no calls are being coalesced");
  std::vector<WorkPointer> works = std::move(all->under_way);
  const auto add = [&](WorkPointer work) {
    if (work) works.push_back(std::move(work));
  };
  if (!all->messages.empty()) {
    const DeviceSide::Carrier carrier = device_side_.carrier(getBoundDeviceId());
    const bool as_one = carrier->supportsCoalescing();
    if (as_one) carrier->startCoalescing();
    try {
      for (const DeviceSide::Move& message : all->messages) add(message(*carrier));
    } catch (...) {
      if (as_one) end_quietly(*carrier);
      throw;
    }
    if (as_one) add(carrier->endCoalescing());
  }
  if (works.size() == 1) return works.front();
  return c10::make_intrusive<CoalescedWork>(std::move(works));
}

WorkPointer Backend::coalesce(WorkPointer work) {
  std::vector<WorkPointer> works;
  {
    const std::lock_guard lock(coalescing_);
    if (!coalesced_ || !work) return work;
    works.swap(coalesced_->under_way);
  }
  // A block that an exception has left does not keep all later calls. Python may be asked: no lock.
  std::erase_if(works, [](const auto& each) { return each->isCompleted() && !each->exception(); });
  works.push_back(work);
  const std::lock_guard lock(coalescing_);
  if (coalesced_) works.swap(coalesced_->under_way);
  return work;
}

WorkPointer Backend::carry(Transfer& call, const Tensors& shown, const DeviceSide::Move& move) {
  ++sequence_;
  for (const at::Tensor& each : shown) call.show(each);
  const auto profile = call.profile();
  return coalesce(move(*device_side_.carrier(getBoundDeviceId())));
}

WorkPointer Backend::carry_message(Transfer& call, OpType type, const Tensors& tensors,
                                   DeviceSide::Move move) {
  {
    const std::lock_guard lock(coalescing_);
    if (coalesced_) {
      coalesced_->messages.push_back(std::move(move));
      return c10::make_intrusive<UnsentWork>(rank_, type);
    }
  }
  return carry(call, tensors, move);
}

template <class... Arguments>
WorkPointer Backend::reduce_on_device(OpType type, Transfer& call, const c10d::ReduceOp& op,
                                      bool async, const Tensors& first, Arguments... others) {
  call.reduce_by(op);
  for (const at::Tensor& each : first) call.show(each);
  const std::uint64_t sequence = ++sequence_;
  const auto profile = call.profile();
  device_side_.carrier(getBoundDeviceId());  // which knows its device before Python calls it
  return coalesce(in_python([&]() -> WorkPointer {
    pybind11::object work =
        device_side_.object().attr(call.name())(first, others..., name_of(call.reduce_op()), async);
    if (work.is_none()) return c10::make_intrusive<FinishedWork>(rank_, type, sequence, Tensors());
    return c10::make_intrusive<PythonWork>(rank_, type, sequence, std::move(work));
  }));
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
    return c10::make_intrusive<FinishedWork>(rank_, type, sequence, std::move(transfer).outputs());
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
  return coalesce(c10::make_intrusive<Work>(rank_, type, sequence, call, std::move(cores)));
}

// The c10d operations.

WorkPointer Backend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  if (tensors.size() == 1 && tensors.front().is_sparse()) return allreduce_sparse(tensors, opts);
  Transfer transfer(OpKind::kAllReduce, "pycollective:all_reduce", opts.timeout);
  if (device_side_.take(tensors)) {
    if (!DeviceSide::is_exact(tensors, opts.reduceOp))
      return reduce_on_device(OpType::ALLREDUCE, transfer, opts.reduceOp, opts.asyncOp, tensors);
    return carry(transfer, tensors,
                 [=](c10d::Backend& carrier) mutable { return carrier.allreduce(tensors, opts); });
  }
  const at::Tensor& tensor = only(transfer.name(), tensors);
  transfer.reduce_by(opts.reduceOp);
  transfer.add_in_place(tensor);
  return issue(OpType::ALLREDUCE, std::move(transfer), opts.asyncOp);
}

WorkPointer Backend::allreduce_coalesced(Tensors& tensors,
                                         const c10d::AllreduceCoalescedOptions& opts) {
  Transfer transfer(OpKind::kAllReduce, "pycollective:all_reduce_coalesced", opts.timeout);
  if (device_side_.take(tensors))
    return reduce_on_device(OpType::ALLREDUCE_COALESCED, transfer, opts.reduceOp, opts.asyncOp,
                            tensors);
  transfer.reduce_by(opts.reduceOp);
  for (const at::Tensor& tensor : tensors) check_tensor(transfer.name(), tensor);
  for (const at::Tensor& tensor : tensors) transfer.add_in_place(tensor);
  return issue(OpType::ALLREDUCE_COALESCED, std::move(transfer), opts.asyncOp);
}

WorkPointer Backend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  Transfer transfer(OpKind::kBroadcast, "pycollective:broadcast", opts.timeout);
  if (device_side_.take(tensors))
    return carry(transfer, tensors,
                 [=](c10d::Backend& carrier) mutable { return carrier.broadcast(tensors, opts); });
  const at::Tensor& tensor = only(transfer.name(), tensors);
  check_rank(transfer.name(), opts.rootRank, size_);
  transfer.root(opts.rootRank);
  transfer.add_in_place(tensor);
  return issue(OpType::BROADCAST, std::move(transfer), opts.asyncOp);
}

WorkPointer Backend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  Transfer transfer(OpKind::kReduce, "pycollective:reduce", opts.timeout);
  if (device_side_.take(tensors)) {
    if (!DeviceSide::is_exact(tensors, opts.reduceOp))
      return reduce_on_device(OpType::REDUCE, transfer, opts.reduceOp, opts.asyncOp, tensors,
                              opts.rootRank);
    return carry(transfer, tensors,
                 [=](c10d::Backend& carrier) mutable { return carrier.reduce(tensors, opts); });
  }
  const at::Tensor& tensor = only(transfer.name(), tensors);
  check_rank(transfer.name(), opts.rootRank, size_);
  transfer.root(opts.rootRank);
  transfer.reduce_by(opts.reduceOp);
  if (rank_ == opts.rootRank)
    transfer.add_in_place(tensor);
  else
    transfer.add(transfer.read(tensor), nullptr, tensor.scalar_type(), tensor.numel());
  return issue(OpType::REDUCE, std::move(transfer), opts.asyncOp);
}

WorkPointer Backend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                               const c10d::AllgatherOptions& opts) {
  Transfer transfer(OpKind::kAllGather, "pycollective:all_gather", opts.timeout);
  if (device_side_.take(inputs))
    return carry(transfer, inputs, [=](c10d::Backend& carrier) mutable {
      return carrier.allgather(outputs, inputs, opts);
    });
  const at::Tensor& input = only(transfer.name(), inputs);
  const Tensors& shards = one_a_rank(transfer.name(), outputs, size_, input);
  transfer.add_between(input, shards, input);
  return issue(OpType::ALLGATHER, std::move(transfer), opts.asyncOp);
}

WorkPointer Backend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                     const c10d::AllgatherOptions& opts) {
  Transfer transfer(OpKind::kAllGather, "pycollective:all_gather_into_tensor", opts.timeout);
  if (device_side_.take(input))
    return carry(transfer, {input}, [=](c10d::Backend& carrier) mutable {
      return carrier._allgather_base(output, input, opts);
    });
  check_shards(transfer.name(), output, input, size_);
  transfer.add_between(input, output, input);
  return issue(OpType::_ALLGATHER_BASE, std::move(transfer), opts.asyncOp);
}

WorkPointer Backend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                     const c10d::AllgatherOptions& opts) {
  Transfer transfer(OpKind::kAllGather, "pycollective:all_gather_into_tensor_coalesced",
                    opts.timeout);
  if (device_side_.take(inputs))
    return carry(transfer, inputs, [=](c10d::Backend& carrier) mutable {
      return carrier.allgather_into_tensor_coalesced(outputs, inputs, opts);
    });
  check_pairs(transfer.name(), outputs, inputs);
  for (std::size_t i = 0; i < inputs.size(); ++i)
    check_shards(transfer.name(), outputs[i], inputs[i], size_);
  for (std::size_t i = 0; i < inputs.size(); ++i)
    transfer.add_between(inputs[i], outputs[i], inputs[i]);
  return issue(OpType::ALLGATHER_COALESCED, std::move(transfer), opts.asyncOp);
}

WorkPointer Backend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                         const c10d::AllgatherOptions& opts) {
  Transfer transfer(OpKind::kAllGather, "pycollective:all_gather_coalesced", opts.timeout);
  if (device_side_.take(inputs))
    return carry(transfer, inputs, [=](c10d::Backend& carrier) mutable {
      return carrier.allgather_coalesced(outputs, inputs, opts);
    });
  check_coalesced(transfer.name(), outputs, inputs, size_);
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    Tensors shards;
    for (const Tensors& of_rank : outputs) shards.push_back(of_rank[i]);
    transfer.add_between(inputs[i], shards, inputs[i]);
  }
  return issue(OpType::ALLGATHER_COALESCED, std::move(transfer), opts.asyncOp);
}

WorkPointer Backend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                    const c10d::ReduceScatterOptions& opts) {
  Transfer transfer(OpKind::kReduceScatter, "pycollective:reduce_scatter", opts.timeout);
  if (device_side_.take(outputs)) {
    if (!DeviceSide::is_exact(outputs, opts.reduceOp))
      return reduce_on_device(OpType::REDUCE_SCATTER, transfer, opts.reduceOp, opts.asyncOp,
                              outputs, inputs);
    return carry(transfer, outputs, [=](c10d::Backend& carrier) mutable {
      return carrier.reduce_scatter(outputs, inputs, opts);
    });
  }
  const at::Tensor& output = only(transfer.name(), outputs);
  const Tensors& shards = one_a_rank(transfer.name(), inputs, size_, output);
  transfer.reduce_by(opts.reduceOp);
  transfer.add_between(shards, output, output);
  return issue(OpType::REDUCE_SCATTER, std::move(transfer), opts.asyncOp);
}

WorkPointer Backend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                          const c10d::ReduceScatterOptions& opts) {
  Transfer transfer(OpKind::kReduceScatter, "pycollective:reduce_scatter_tensor", opts.timeout);
  if (device_side_.take(output)) {
    if (!DeviceSide::is_exact({output}, opts.reduceOp))
      return reduce_on_device(OpType::_REDUCE_SCATTER_BASE, transfer, opts.reduceOp, opts.asyncOp,
                              Tensors{output}, Tensors{input});
    return carry(transfer, {output}, [=](c10d::Backend& carrier) mutable {
      return carrier._reduce_scatter_base(output, input, opts);
    });
  }
  check_shards(transfer.name(), input, output, size_);
  transfer.reduce_by(opts.reduceOp);
  transfer.add_between(input, output, output);
  return issue(OpType::_REDUCE_SCATTER_BASE, std::move(transfer), opts.asyncOp);
}

WorkPointer Backend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                     const c10d::ReduceScatterOptions& opts) {
  Transfer transfer(OpKind::kReduceScatter, "pycollective:reduce_scatter_tensor_coalesced",
                    opts.timeout);
  if (device_side_.take(outputs)) {
    if (!DeviceSide::is_exact(outputs, opts.reduceOp))
      return reduce_on_device(OpType::COALESCED, transfer, opts.reduceOp, opts.asyncOp, outputs,
                              inputs);
    return carry(transfer, outputs, [=](c10d::Backend& carrier) mutable {
      return carrier.reduce_scatter_tensor_coalesced(outputs, inputs, opts);
    });
  }
  check_pairs(transfer.name(), outputs, inputs);
  for (std::size_t i = 0; i < inputs.size(); ++i)
    check_shards(transfer.name(), inputs[i], outputs[i], size_);
  transfer.reduce_by(opts.reduceOp);
  for (std::size_t i = 0; i < inputs.size(); ++i)
    transfer.add_between(inputs[i], outputs[i], outputs[i]);
  return issue(OpType::COALESCED, std::move(transfer), opts.asyncOp);
}

WorkPointer Backend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                            const c10d::GatherOptions& opts) {
  Transfer transfer(OpKind::kGather, "pycollective:gather", opts.timeout);
  if (device_side_.take(inputs))
    return carry(transfer, inputs, [=](c10d::Backend& carrier) mutable {
      return carrier.gather(outputs, inputs, opts);
    });
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
  if (device_side_.take(outputs))
    return carry(transfer, outputs, [=](c10d::Backend& carrier) mutable {
      return carrier.scatter(outputs, inputs, opts);
    });
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
  if (device_side_.take(input))
    return carry(transfer, {input}, [=](c10d::Backend& carrier) mutable {
      return carrier.alltoall_base(output, input, output_splits, input_splits, opts);
    });
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
  if (device_side_.take(inputs))
    return carry(transfer, inputs, [=](c10d::Backend& carrier) mutable {
      return carrier.alltoall(outputs, inputs, opts);
    });
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
  if (device_side_.take(tensors))
    return carry_message(transfer, OpType::SEND, tensors, [=](c10d::Backend& carrier) mutable {
      return carrier.send(tensors, destination, tag);
    });
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
  if (device_side_.take(tensors))
    return carry_message(transfer, type, tensors, [=](c10d::Backend& carrier) mutable {
      return any ? carrier.recvAnysource(tensors, tag) : carrier.recv(tensors, source, tag);
    });
  const at::Tensor& tensor = only(transfer.name(), tensors);
  check_tag(transfer.name(), tag);
  transfer.root(source);
  transfer.tag(tag);
  transfer.add(nullptr, transfer.write(tensor), tensor.scalar_type(), tensor.numel());
  return issue(type, std::move(transfer), true);
}

WorkPointer Backend::barrier(const c10d::BarrierOptions& opts) {
  Transfer transfer(OpKind::kBarrier, "pycollective:barrier", opts.timeout);
  // torch does not say on which device. It has told the group of one, or the call names one.
  if (device_side_.takes_cpu() || getBoundDeviceId() || !opts.device_ids.empty())
    return carry(transfer, {}, [=](c10d::Backend& carrier) { return carrier.barrier(opts); });
  transfer.add(nullptr, nullptr, at::kByte, 0);
  return issue(OpType::BARRIER, std::move(transfer), opts.asyncOp);
}

// A barrier that names the ranks that did not come. Every rank sends rank 0 a byte; rank 0 waits
// for them in turn, and answers once all have come: 2 (n - 1) messages of a byte. Rank 0 names the
// first late rank, or all, and aborts the group: so the ranks that wait for its answer end, too.
// The words are Gloo's, which PyTorch's users know.
//
// A group that fails ends all receives, those from late ranks, too. So the error of a receive does
// not blame the rank that it is from.
namespace {

using Milliseconds = std::chrono::milliseconds;
using Works = std::vector<std::shared_ptr<pycollective::Work>>;

constexpr Milliseconds kGrace{1000};

WaitingTime waiting_time(Milliseconds limit) {
  return WaitingTime(WaitingTime::Seconds(limit).count());
}

std::string not_passed(const std::vector<int>& absent, Milliseconds timeout) {
  std::ostringstream said;
  said << (absent.size() == 1 ? "Rank " : "Ranks ");
  for (std::size_t i = 0; i < absent.size(); ++i) said << (i == 0 ? "" : ", ") << absent[i];
  said << " failed to pass monitoredBarrier in " << timeout.count() << " ms";
  return said.str();
}

// What rank 0 says if the group fails before all have come. `absent`: the ranks that were late
// then.
std::string cut_short(const std::vector<int>& absent, Milliseconds timeout, const Failure& cause) {
  int lost = -1;
  // The message about a lost rank names it first.
  const std::size_t at = cause.message.find("rank ");
  if (cause.kind == FailureKind::kPeerFailure && at != std::string::npos)
    std::sscanf(cause.message.c_str() + at, "rank %d", &lost);
  return (absent.empty() ? "" : not_passed(absent, timeout) + "; ") +
         (lost >= 0 ? "Rank " + std::to_string(lost) + " failed to pass monitoredBarrier: "
                    : "Rank 0 successfully reached monitoredBarrier, but received errors while "
                      "waiting for others: ") +
         cause.message;
}

}  // namespace

void Backend::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
  constexpr int kRoot = 0;
  const auto fail = [&](FailureKind kind, const std::string& text) {
    throw CollectiveFailure({kind, rank_, OpKind::kBarrier, sequence_, text});
  };
  Milliseconds timeout = opts.timeout;
  if (timeout == c10d::kUnsetTimeout)
    timeout = std::chrono::duration_cast<Milliseconds>(
        std::chrono::duration<double>(collectives_->timeout()));
  ++sequence_;
  // Raised on every rank before any message that a later receive could take.
  if (timeout.count() <= 0)
    typed([&](const InterruptHook&) {
      fail(FailureKind::kTimeout, "Rank " + std::to_string(rank_) +
                                      " timed out in monitoredBarrier after " +
                                      std::to_string(timeout.count()) + " ms");
    });

  // The core may write here after an error has ended this call.
  const auto bytes = std::make_shared<std::vector<std::uint8_t>>(2 * size_);
  Request request;
  request.tag = kBarrierTag;
  request.dtype = Dtype::kUInt8;
  request.count = 1;
  request.keep = bytes;
  // Longer than the waits below, which know who is missing; the group's own timeout may be shorter.
  request.timeout = std::chrono::duration<double>(2 * timeout + 2 * kGrace).count();
  const auto send = [&](int to) {
    request.kind = OpKind::kSend;
    request.root = to;
    request.input = bytes->data() + to;
    request.output = nullptr;
    return collectives_->submit(request, [bytes](const Failure*) {});
  };
  const auto receive = [&](int from) {
    request.kind = OpKind::kRecv;
    request.root = from;
    request.input = nullptr;
    request.output = bytes->data() + size_ + from;
    return collectives_->submit(request, [bytes](const Failure*) {});
  };

  typed([&](const InterruptHook& interrupted) {
    if (rank_ != kRoot) {
      const std::string reached = "Rank " + std::to_string(rank_) +
                                  " successfully reached monitoredBarrier, but received errors "
                                  "while waiting for send/recv from rank 0";
      try {
        const Works works{send(kRoot), receive(kRoot)};
        // Rank 0 may come last and then wait as long for others. It knows who is missing, so this
        // rank waits for its word.
        WaitingTime time = waiting_time(2 * timeout + kGrace);
        for (const auto& work : works)
          if (!ends_in(time, *work, interrupted)) {
            const std::string late =
                ": timed out after twice its timeout of " + std::to_string(timeout.count()) + " ms";
            collectives_->abort(reached + late);
            fail(FailureKind::kTimeout, reached + late);
          }
      } catch (const CollectiveFailure& error) {
        if (error.failure().kind == FailureKind::kConfiguration ||
            error.failure().message.compare(0, reached.size(), reached) == 0)
          throw;
        fail(error.failure().kind, reached + ": " + error.failure().message);
      }
      return;
    }
    WaitingTime time = waiting_time(timeout);
    std::vector<int> absent;
    try {
      Works come;
      for (int rank = 1; rank < size_; ++rank) come.push_back(receive(rank));
      for (int rank = 1; rank < size_; ++rank) {
        if (ends_in(time, *come[static_cast<std::size_t>(rank - 1)], interrupted)) continue;
        absent.push_back(rank);
        if (!wait_all_ranks) break;
      }
    } catch (const CollectiveFailure& error) {
      if (error.failure().kind == FailureKind::kConfiguration) throw;  // it is closed
      fail(error.failure().kind, cut_short(absent, timeout, error.failure()));
    }
    if (!absent.empty()) {
      collectives_->abort(not_passed(absent, timeout));
      fail(FailureKind::kTimeout,
           not_passed(absent, timeout) +
               ". Look at what those ranks do instead, or give a longer timeout");
    }
    Works answers;
    for (int rank = 1; rank < size_; ++rank) answers.push_back(send(rank));
    for (const auto& work : answers) work->wait(0, interrupted);
  });
}

// The all-reduce of sparse tensors, with the bits of dense ones: a missing element counts as 0.
//
//   1. All ranks gather shape, dtype and number of elements: 152 bytes.
//   2. They gather all indices, a number each: 8 bytes an element and rank.
//   3. Each puts its values into a block with a row for every index of any rank; they reduce the
//   block.
//
// Each step needs the results of the one before. So an asynchronous call, too, is done when it
// returns: calls issued after it must come after all three steps on every rank.
namespace {

constexpr const char* kTitle = "pycollective:all_reduce";
constexpr std::size_t kMostDimensions = std::tuple_size_v<SparseShape> - 3;

SparseShape shape_of(const at::Tensor& tensor, std::int64_t elements) {
  SparseShape shape{};
  std::copy(tensor.sizes().begin(), tensor.sizes().end(), shape.begin());
  shape[kMostDimensions] = tensor.sparse_dim() * 64 + tensor.dense_dim();
  shape[kMostDimensions + 1] = static_cast<std::int64_t>(tensor.scalar_type());
  shape.back() = elements;
  return shape;
}

// The number of elements of each rank. Throws on every rank if shapes or dtypes differ.
std::vector<std::size_t> counts_of(const char* name, const std::vector<SparseShape>& every,
                                   int own) {
  std::vector<std::size_t> counts;
  for (const SparseShape& each : every) {
    // Compared with the first, so all ranks see it and say the same.
    TORCH_CHECK_VALUE(std::equal(each.begin(), each.end() - 1, every.front().begin()), name,
                      ": the sparse tensors of rank 0 and rank ", counts.size(),
                      " differ in shape, sparse dimensions or dtype; nothing was reduced (rank ",
                      own, ")");
    counts.push_back(static_cast<std::size_t>(each.back()));
  }
  return counts;
}

// A number for each index: its place in row-major order of the sparse dimensions. 64 bits suffice,
// as for torch's own sizes.
at::Tensor numbers_of(const at::Tensor& indices, at::IntArrayRef sizes) {
  at::Tensor numbers = at::zeros({indices.size(1)}, indices.options());
  for (std::int64_t d = 0; d < indices.size(0); ++d) numbers.mul_(sizes[d]).add_(indices[d]);
  return numbers;
}

at::Tensor indices_of(at::Tensor numbers, std::int64_t dimensions, at::IntArrayRef sizes) {
  at::Tensor indices = at::empty({dimensions, numbers.numel()}, numbers.options());
  for (std::int64_t d = dimensions - 1; d >= 0; --d) {
    indices[d].copy_(numbers.remainder(sizes[d]));
    numbers = numbers.div(sizes[d], "floor");
  }
  return indices;
}

// torch.distributed passes complex tensors as views of two real numbers each, and a sparse view
// does not share its base's memory. (In inference mode a view is not known as one, and a complex
// tensor stays as it was, as with Gloo.)
void put(const at::Tensor& reduced, const at::Tensor& tensor) {
  const c10::InferenceMode as_the_tensor_was_made(tensor.is_inference());
  const at::NoGradGuard no_grad;
  tensor.copy_(reduced);
  if (!tensor.is_view() || !tensor._base().is_complex()) return;
  const at::Tensor base(tensor._base());
  const at::Tensor complex = at::_sparse_coo_tensor_unsafe(
      reduced.indices(), at::view_as_complex(reduced.values()), base.sizes(), base.options());
  complex._coalesced_(true);
  base.copy_(complex);
}

}  // namespace

c10::intrusive_ptr<c10d::Work> Backend::allreduce_sparse(std::vector<at::Tensor>& tensors,
                                                         const c10d::AllreduceOptions& opts) {
  Transfer call(OpKind::kAllReduce, kTitle, opts.timeout);
  const char* const name = call.name();
  TORCH_CHECK_VALUE(tensors.size() == 1, name, ": one tensor a rank, not ", tensors.size());
  at::Tensor& tensor = tensors.front();
  TORCH_CHECK_NOT_IMPLEMENTED(tensor.defined() && tensor.is_sparse() && tensor.device().is_cpu(),
                              name, ": a sparse tensor in COO layout on the CPU is expected");
  TORCH_CHECK_NOT_IMPLEMENTED(
      opts.reduceOp == c10d::ReduceOp::SUM || opts.reduceOp == c10d::ReduceOp::AVG, name,
      ": sparse tensors can be summed and averaged; use to_dense() for others");
  TORCH_CHECK_VALUE(tensor.dim() <= static_cast<std::int64_t>(kMostDimensions), name,
                    ": a sparse tensor of ", tensor.dim(), " dimensions, at most ", kMostDimensions,
                    " are supported");
  const at::NoGradGuard no_grad;
  check_reduces(call, tensor, opts);
  const std::uint64_t sequence = ++sequence_;
  // If a step fails on this rank alone, tell the others, which wait for its next step.
  const auto alone = [&](const auto& step) {
    try {
      return step();
    } catch (...) {
      if (!collectives_->failure())
        collectives_->abort("all_reduce of a sparse tensor failed on rank " +
                            std::to_string(rank_));
      throw;
    }
  };
  const at::Tensor own = alone([&] { return tensor.coalesce(); });
  const Shapes every = alone([&] { return gather_shapes(own, opts); });
  const std::vector<std::size_t> counts = counts_of(name, every, rank_);
  const at::Tensor reduced = alone([&] { return reduce_rows(own, counts, call, opts); });
  put(reduced, tensor);
  return c10::make_intrusive<FinishedWork>(rank_, c10d::OpType::ALLREDUCE, sequence, tensors);
}

// Refuses before anything moves what all ranks refuse alike.
void Backend::check_reduces(Transfer& call, const at::Tensor& tensor,
                            const c10d::AllreduceOptions& opts) const {
  call.reduce_by(opts.reduceOp);
  Transfer none = call;
  none.add(nullptr, nullptr, tensor.scalar_type(), 0);
  const Request& request = none.requests().back();
  if (is_defined(request.dtype, request.reduce_op)) return;
  typed([&](const InterruptHook&) {
    throw CollectiveFailure({FailureKind::kConfiguration, rank_, request.kind, 0,
                             std::string(call.name()) + ": " + name_of(request.reduce_op) +
                                 " has no meaning for " + name_of(request.dtype)});
  });
}

// Step 1: the shapes of all ranks.
Backend::Shapes Backend::gather_shapes(const at::Tensor& own, const c10d::AllreduceOptions& opts) {
  const SparseShape shape = shape_of(own, own.indices().size(1));
  const at::Tensor mine = at::empty({static_cast<std::int64_t>(shape.size())}, at::kLong);
  std::copy(shape.begin(), shape.end(), mine.mutable_data_ptr<std::int64_t>());
  const at::Tensor every = at::empty({size_, mine.numel()}, at::kLong);
  Transfer shapes(OpKind::kAllGather, kTitle, opts.timeout);
  const void* from = shapes.read(mine);
  shapes.add(from, shapes.write(every), at::kLong, mine.numel());
  carry_out(shapes);
  Shapes all(static_cast<std::size_t>(size_));
  for (std::size_t rank = 0; rank < all.size(); ++rank)
    std::copy_n(every.const_data_ptr<std::int64_t>() + rank * shape.size(), shape.size(),
                all[rank].begin());
  return all;
}

// Steps 2 and 3: the reduced tensor, coalesced. `call`: the all-reduce, as profilers see it.
at::Tensor Backend::reduce_rows(const at::Tensor& own, const std::vector<std::size_t>& counts,
                                Transfer& call, const c10d::AllreduceOptions& opts) {
  const at::IntArrayRef sizes = own.sizes();
  const std::int64_t sparse_dims = own.sparse_dim();
  const at::Tensor numbers = numbers_of(own.indices(), sizes);
  std::int64_t all = 0;
  for (const std::size_t each : counts) all += static_cast<std::int64_t>(each);
  const at::Tensor gathered = at::empty({all}, at::kLong);
  Transfer indices(OpKind::kAllGather, kTitle, opts.timeout);
  const void* from = indices.read(numbers);
  indices.add_uneven(from, indices.write(gathered), at::kLong, counts);
  carry_out(indices);

  const at::Tensor rows = std::get<0>(at::_unique(gathered, /*sorted=*/true));
  std::vector<std::int64_t> block_sizes{rows.numel()};
  block_sizes.insert(block_sizes.end(), sizes.begin() + sparse_dims, sizes.end());
  at::Tensor block = at::zeros(block_sizes, own.values().options());
  block.index_copy_(0, at::searchsorted(rows, numbers), own.values());
  void* data = call.update(block);
  call.add(data, data, block.scalar_type(), block.numel());
  const auto profile = call.profile();
  carry_out(call);
  const at::Tensor reduced = at::_sparse_coo_tensor_unsafe(indices_of(rows, sparse_dims, sizes),
                                                           block, sizes, own.options());
  reduced._coalesced_(true);
  return reduced;
}

}  // namespace pycollective::shim
