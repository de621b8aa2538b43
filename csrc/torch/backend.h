// pycollective as torch.distributed knows it: c10d's operations over the core's Collectives.
#pragma once

#include <pybind11/pybind11.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "engine/api.h"
#include "torch/completion_threads.h"
#include "torch/device_side.h"
#include "torch/transfer.h"

namespace pycollective::shim {

// A sparse tensor's sizes, numbers of dimensions and dtype, which all ranks must share; then its
// number of elements.
using SparseShape = std::array<std::int64_t, 19>;

// On CPU tensors each call checks them first; nothing moves if a check fails. A synchronous call
// then runs on the caller's thread; an asynchronous one goes to the core and returns a Work at
// once. Calls with tensors on devices go to `device_side`. Thread-safe, but for coalescing.
class Backend final : public c10d::Backend {
 public:
  // `owner`: the Python Communicator of `collectives`; it lives as long as this.
  // `device_side`: as DeviceSide takes it.
  Backend(std::shared_ptr<Collectives> collectives, std::shared_ptr<CompletionThreads> threads,
          pybind11::object owner, pybind11::object device_side);
  const std::string getBackendName() const override { return "pycollective"; }
  c10::intrusive_ptr<Options> getBackendOptions() override;
  void setTimeout(std::chrono::milliseconds timeout) override;
  c10d::ErrorType getError() override;
  // Counts calls. Every rank makes the same calls, so there is nothing to agree on first.
  void setSequenceNumberForGroup() override {}
  std::uint64_t getSequenceNumberForGroup() override { return sequence_; }

  // The Python Communicator. The caller holds the GIL.
  pybind11::object communicator() const { return owner_.get(); }
  // What makes the reductions on devices. The caller holds the GIL.
  pybind11::object device_side() const { return device_side_.object(); }

  // From start to end, messages on devices wait, and then go as one group of the carrier's, where
  // it has groups, since two ranks that each send first would wait for each other. Other calls go
  // at once: torch does not end a block that an exception has left. The end returns a work for all.
  bool supportsCoalescing() const override { return device_side_.may_come(); }
  void startCoalescing() override;
  c10::intrusive_ptr<c10d::Work> endCoalescing() override;

  // A flat tensor in memory that ranks of this host read in place, for FSDP2's buffers
  // (FSDPModule.set_allocate_memory_from_process_group_for_comm) and pycollective.torch.empty.
  bool supportsTensorAlloc(c10::DeviceIndex device) override;
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;

  // Fails the group on every rank; needs no peer.
  void abort() override;
  // Waits for what was issued and for the callbacks of its futures, then leaves the group.
  void shutdown() override;

  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> allreduce_coalesced(
      std::vector<at::Tensor>& tensors, const c10d::AllreduceCoalescedOptions& opts) override;
  // The sum or average of sparse tensors, with the bits of dense ones (sparse.cpp). It is done when
  // it returns, even if asynchronous.
  c10::intrusive_ptr<c10d::Work> allreduce_sparse(std::vector<at::Tensor>& tensors,
                                                  const c10d::AllreduceOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> reduce(std::vector<at::Tensor>& tensors,
                                        const c10d::ReduceOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                           std::vector<at::Tensor>& inputs,
                                           const c10d::AllgatherOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(
      std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
      const c10d::AllgatherOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> allgather_coalesced(std::vector<std::vector<at::Tensor>>& outputs,
                                                     std::vector<at::Tensor>& inputs,
                                                     const c10d::AllgatherOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> reduce_scatter(std::vector<at::Tensor>& outputs,
                                                std::vector<std::vector<at::Tensor>>& inputs,
                                                const c10d::ReduceScatterOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(
      std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
      const c10d::ReduceScatterOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> gather(std::vector<std::vector<at::Tensor>>& outputs,
                                        std::vector<at::Tensor>& inputs,
                                        const c10d::GatherOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> scatter(std::vector<at::Tensor>& outputs,
                                         std::vector<std::vector<at::Tensor>>& inputs,
                                         const c10d::ScatterOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& output, at::Tensor& input,
                                               std::vector<std::int64_t>& output_splits,
                                               std::vector<std::int64_t>& input_splits,
                                               const c10d::AllToAllOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> alltoall(std::vector<at::Tensor>& outputs,
                                          std::vector<at::Tensor>& inputs,
                                          const c10d::AllToAllOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int destination,
                                      int tag) override;
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int source,
                                      int tag) override;
  c10::intrusive_ptr<c10d::Work> recvAnysource(std::vector<at::Tensor>& tensors, int tag) override;
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& opts) override;
  // A barrier whose rank 0 names the ranks that did not come (monitored_barrier.cpp).
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override;

 private:
  c10::intrusive_ptr<c10d::Work> receive(c10d::OpType type, std::vector<at::Tensor>& tensors,
                                         int source, int tag);
  c10::intrusive_ptr<c10d::Work> issue(c10d::OpType type, Transfer transfer, bool async);
  // The steps of allreduce_sparse.
  using Shapes = std::vector<SparseShape>;
  void check_reduces(Transfer& call, const at::Tensor& tensor,
                     const c10d::AllreduceOptions& opts) const;
  Shapes gather_shapes(const at::Tensor& own, const c10d::AllreduceOptions& opts);
  at::Tensor reduce_rows(const at::Tensor& own, const std::vector<std::size_t>& counts,
                         Transfer& call, const c10d::AllreduceOptions& opts);
  // Runs the call on this thread, and copies results back.
  void carry_out(Transfer& transfer);

  // Calls on devices: one of the carrier's, and a reduction, a method of Python's by the name of
  // `call`. A message among coalesced calls waits for their end. Profilers are shown some tensors.
  c10::intrusive_ptr<c10d::Work> carry(Transfer& call, const std::vector<at::Tensor>& shown,
                                       const DeviceSide::Move& move);
  c10::intrusive_ptr<c10d::Work> carry_message(Transfer& call, c10d::OpType type,
                                               const std::vector<at::Tensor>& tensors,
                                               DeviceSide::Move move);
  template <class... Arguments>
  c10::intrusive_ptr<c10d::Work> reduce_on_device(c10d::OpType type, Transfer& call,
                                                  const c10d::ReduceOp& op, bool async,
                                                  const std::vector<at::Tensor>& first,
                                                  Arguments... others);

  struct Coalesced {
    std::vector<DeviceSide::Move> messages;
    std::vector<c10::intrusive_ptr<c10d::Work>> under_way;
  };
  // Remembers a call's work, if calls are being coalesced; returns it.
  c10::intrusive_ptr<c10d::Work> coalesce(c10::intrusive_ptr<c10d::Work> work);

  const std::shared_ptr<Collectives> collectives_;
  const std::shared_ptr<CompletionThreads> threads_;
  const PythonObject owner_;
  DeviceSide device_side_;
  std::mutex coalescing_;
  std::optional<Coalesced> coalesced_;
  std::atomic<std::uint64_t> sequence_{0};
};

}  // namespace pycollective::shim
