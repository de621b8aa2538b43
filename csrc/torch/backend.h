// pycollective as torch.distributed knows it: c10d's operations over the core's Collectives.
#pragma once

#include <pybind11/pybind11.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <array>
#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "engine/api.h"
#include "torch/completion_threads.h"
#include "torch/transfer.h"

namespace pycollective::shim {

// A sparse tensor's sizes, numbers of dimensions and dtype, which all ranks must share; then its
// number of elements.
using SparseShape = std::array<std::int64_t, 19>;

// Each call checks its tensors first; nothing moves if a check fails. A synchronous call then runs
// on the caller's thread; an asynchronous one goes to the core and returns a Work at once.
// Thread-safe.
class Backend final : public c10d::Backend {
 public:
  // `owner`: the Python Communicator of `collectives`; it lives as long as this.
  Backend(std::shared_ptr<Collectives> collectives, std::shared_ptr<CompletionThreads> threads,
          pybind11::object owner);
  ~Backend() override;

  const std::string getBackendName() const override { return "pycollective"; }
  c10::intrusive_ptr<Options> getBackendOptions() override;
  void setTimeout(std::chrono::milliseconds timeout) override;
  c10d::ErrorType getError() override;
  // Counts calls. Every rank makes the same calls, so there is nothing to agree on first.
  void setSequenceNumberForGroup() override {}
  std::uint64_t getSequenceNumberForGroup() override { return sequence_; }

  // The Python Communicator. The caller holds the GIL.
  pybind11::object communicator() const { return owner_; }

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

  const std::shared_ptr<Collectives> collectives_;
  const std::shared_ptr<CompletionThreads> threads_;
  pybind11::object owner_;
  std::atomic<std::uint64_t> sequence_{0};
};

}  // namespace pycollective::shim
