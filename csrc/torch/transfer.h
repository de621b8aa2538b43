// A c10d call on its way to the core: checked tensors in, requests out.
//
// The core reads and writes plain memory. Tensors that are plain memory are used where they lie;
// others (strided, conjugated, lists that are not one buffer) are staged in a buffer of their own
// and copied back after success.
#pragma once

#include <ATen/ATen.h>
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

  // Where the core reads a tensor, writes it, or both. The lists are equal tensors in rank order,
  // which the core wants in one buffer.
  const void* read(const at::Tensor& tensor);
  void* write(const at::Tensor& tensor);
  void* update(const at::Tensor& tensor);
  const void* read(const std::vector<at::Tensor>& tensors);
  void* write(const std::vector<at::Tensor>& tensors);

  // One request; `count` as the core's Request has it, in elements. Null: this rank has no such
  // side.
  void add(const void* input, void* output, at::ScalarType dtype, std::int64_t count);

  const char* name() const;  // "all_reduce"
  const char* profiling_title() const { return profiling_title_; }
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
  const char* profiling_title_;
  Request like_;
  std::vector<Request> requests_;
  std::vector<at::Tensor> inputs_;  // these and the outputs: what must live until the core is done
  std::vector<at::Tensor> outputs_;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_;  // to, from
};

}  // namespace pycollective::shim
