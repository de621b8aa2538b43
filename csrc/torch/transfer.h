// A c10d call as requests to the core.
//
// The core reads and writes plain memory. Tensors that are plain memory are used in place. Others
// (strided, conjugated, lists that are not one buffer) are staged in a buffer, and results are
// copied back after success.
#pragma once

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <chrono>
#include <memory>
#include <utility>
#include <vector>

#include "engine/api.h"
#include "torch/completion_threads.h"

namespace pycollective::shim {

class Transfer {
 public:
  // `profiling_title`: a literal, "pycollective:" and the operation's name.
  Transfer(OpKind kind, const char* profiling_title, std::chrono::milliseconds timeout);

  // Reductions take the contract's dtypes, and complex numbers for sum and average, part by part.
  // Other operations move any dtype: one that the core does not know goes as bytes.
  void reduce_by(const c10d::ReduceOp& op);
  ReduceOp reduce_op() const { return like_.reduce_op; }
  void root(std::int64_t rank) { like_.root = static_cast<int>(rank); }
  void tag(int tag) { like_.tag = tag; }

  // The memory that the core reads, writes, or both. A list has equal tensors in rank order, which
  // the core wants in one buffer.
  const void* read(const at::Tensor& tensor);
  void* write(const at::Tensor& tensor);
  void* update(const at::Tensor& tensor);
  const void* read(const std::vector<at::Tensor>& tensors);
  // As read() of each; copies those that overlap one of `outputs`. For calls that write some
  // outputs before they have read all inputs.
  std::vector<const void*> read_apart(const std::vector<at::Tensor>& tensors,
                                      const std::vector<at::Tensor>& outputs);
  void* write(const std::vector<at::Tensor>& tensors);

  // Adds a request of `count` elements, as the core's Request counts them. A null pointer: this
  // rank has no such buffer.
  void add(const void* input, void* output, at::ScalarType dtype, std::int64_t count);
  // Adds a request on the whole tensor, in place, or from one tensor or list to another, of as many
  // elements as `shard` has.
  void add_in_place(const at::Tensor& tensor) {
    void* const data = update(tensor);
    add(data, data, tensor.scalar_type(), tensor.numel());
  }
  template <class From, class To>
  void add_between(const From& from, const To& to, const at::Tensor& shard) {
    add(read(from), write(to), shard.scalar_type(), shard.numel());
  }
  // As add(), with a number of elements for each rank's shard.
  void add_uneven(const void* input, void* output, at::ScalarType dtype,
                  std::vector<std::size_t> counts);

  // Adds an all-to-all with what is sent to and received from each rank, in elements.
  void add_all_to_all_v(std::vector<AllToAllVPart> parts, at::ScalarType dtype);

  const char* name() const;  // "all_reduce"
  // A profiler's record of the call, which ends with it: title and input shapes. Null if nobody
  // profiles. It may end on another thread.
  std::unique_ptr<at::RecordFunction> profile() const;
  // Shows the profiler a tensor that is not passed to read(), write() or update().
  void show(const at::Tensor& tensor);
  const std::vector<Request>& requests() const { return requests_; }
  // The tensors that were passed to write() and update().
  const std::vector<at::Tensor>& outputs() const& { return outputs_; }
  std::vector<at::Tensor> outputs() && { return std::move(outputs_); }
  // Keeps the requests' memory alive; null unless `collectives` want it.
  std::shared_ptr<const void> keep(const Collectives& collectives,
                                   const std::shared_ptr<CompletionThreads>& threads) const;
  bool copies_back() const { return !copies_.empty(); }
  // After success, once.
  void copy_back();

 private:
  const char* profiling_title_;
  Request like_;
  std::vector<Request> requests_;
  std::vector<at::Tensor> inputs_;  // these and outputs_ live until the core is done
  std::vector<at::Tensor> outputs_;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_;  // to, from
  std::vector<c10::IValue> shown_;                         // what a profiler shows
};

}  // namespace pycollective::shim
