// A c10d call on its way to the core: checked tensors in, requests out.
//
// The core reads and writes plain memory. Tensors that are plain memory are used where they lie;
// others (strided, conjugated, lists that are not one buffer) are staged in a buffer of their own
// and copied back after success.
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
  // `profiling_title` is "pycollective:" and the operation's name; a literal.
  Transfer(OpKind kind, const char* profiling_title, std::chrono::milliseconds timeout);

  // A reduction takes only the dtypes that the contract reduces, and the sum and the average of
  // complex numbers, part by part. The other operations move any dtype: what the core has no name
  // for goes as bytes.
  void reduce_by(const c10d::ReduceOp& op);
  void root(std::int64_t rank) { like_.root = static_cast<int>(rank); }
  void tag(int tag) { like_.tag = tag; }

  // Where the core reads a tensor, writes it, or both. The lists are equal tensors in rank order,
  // which the core wants in one buffer.
  const void* read(const at::Tensor& tensor);
  void* write(const at::Tensor& tensor);
  void* update(const at::Tensor& tensor);
  const void* read(const std::vector<at::Tensor>& tensors);
  // Each as read() has it, of a copy where it overlaps one of `outputs`: for calls that write some
  // outputs before they have read all inputs.
  std::vector<const void*> read_apart(const std::vector<at::Tensor>& tensors,
                                      const std::vector<at::Tensor>& outputs);
  void* write(const std::vector<at::Tensor>& tensors);

  // What the caller gets is in place already.
  void gives(const at::Tensor& tensor) { outputs_.push_back(tensor); }

  // One request; `count` as the core's Request has it, in elements. Null: this rank has no such
  // side.
  void add(const void* input, void* output, at::ScalarType dtype, std::int64_t count);
  // As add(), of shards that differ: the elements of each rank's.
  void add_uneven(const void* input, void* output, at::ScalarType dtype,
                  std::vector<std::size_t> counts);

  // An uneven all-to-all: what goes to each rank and comes from it, in elements.
  void add_all_to_all_v(std::vector<AllToAllVPart> parts, at::ScalarType dtype);

  const char* name() const;  // "all_reduce"
  // What a profiler shows of the call while this lives: its title, and the shapes of what it takes.
  // Null where nobody profiles. It may end on another thread.
  std::unique_ptr<at::RecordFunction> profile() const;
  const std::vector<Request>& requests() const { return requests_; }
  // What the caller gets; whatever was passed to write and update.
  const std::vector<at::Tensor>& outputs() const { return outputs_; }
  // Keeps the memory that requests name; empty unless `collectives` want it.
  std::shared_ptr<const void> keep(const Collectives& collectives,
                                   const std::shared_ptr<CompletionThreads>& threads) const;
  bool copies_back() const { return !copies_.empty(); }
  // After success, once.
  void copy_back();

 private:
  void show(const at::Tensor& tensor);

  const char* profiling_title_;
  Request like_;
  std::vector<Request> requests_;
  std::vector<at::Tensor> inputs_;  // these and the outputs: what must live until the core is done
  std::vector<at::Tensor> outputs_;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_;  // to, from
  std::vector<c10::IValue> shown_;  // to a profiler; the caller's own tensors
};

}  // namespace pycollective::shim
