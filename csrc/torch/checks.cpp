#include "torch/checks.h"

namespace pycollective::shim {
namespace {

void check_like(const char* name, const at::Tensor& tensor, const at::Tensor& like) {
  TORCH_CHECK_TYPE(tensor.scalar_type() == like.scalar_type(), name,
                   ": the tensors must have one dtype, not ", dtype_name(like.scalar_type()),
                   " and ", dtype_name(tensor.scalar_type()));
  TORCH_CHECK_VALUE(tensor.sizes() == like.sizes(), name, ": the tensors must have one shape, not ",
                    like.sizes(), " and ", tensor.sizes(),
                    "; pad them to equal shapes, or use send and recv");
}

}  // namespace

std::string dtype_name(at::ScalarType dtype) {
  return c10::str("torch.", c10::getDtypeNames(dtype).first);
}

void check_tensor(const char* name, const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.defined(), name, ": a tensor is undefined");
  TORCH_CHECK_NOT_IMPLEMENTED(
      tensor.device().is_cpu(), name,
      ": the pycollective backend takes tensors on the CPU or on a CUDA device, all of a call on "
      "one, not one on ",
      tensor.device());
  TORCH_CHECK_NOT_IMPLEMENTED(tensor.layout() == at::kStrided, name,
                              ": the pycollective backend takes dense tensors, not ",
                              tensor.layout(), "; use to_dense(), or gather indices and values");
}

const at::Tensor& only(const char* name, const std::vector<at::Tensor>& tensors) {
  TORCH_CHECK_VALUE(tensors.size() == 1, name, ": one tensor a rank, not ", tensors.size());
  check_tensor(name, tensors.front());
  return tensors.front();
}

const std::vector<at::Tensor>& one_a_rank(const char* name,
                                          const std::vector<std::vector<at::Tensor>>& lists,
                                          int size, const at::Tensor& like) {
  TORCH_CHECK_VALUE(lists.size() == 1, name, ": one list of tensors, not ", lists.size());
  check_list(name, lists.front(), size);
  for (const at::Tensor& tensor : lists.front()) check_like(name, tensor, like);
  return lists.front();
}

void check_shards(const char* name, const at::Tensor& all, const at::Tensor& shard, int size) {
  check_dtypes(name, all, shard);
  TORCH_CHECK_VALUE(all.numel() == shard.numel() * size, name, ": a tensor for all of ", size,
                    " ranks must hold ", size, " times the ", shard.numel(),
                    " elements of the tensor for one, not ", all.numel());
}

void check_pairs(const char* name, const std::vector<at::Tensor>& outputs,
                 const std::vector<at::Tensor>& inputs) {
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(), name, ": as many outputs as inputs, not ",
                    outputs.size(), " and ", inputs.size());
}

void check_coalesced(const char* name, const std::vector<std::vector<at::Tensor>>& outputs,
                     const std::vector<at::Tensor>& inputs, int size) {
  TORCH_CHECK_VALUE(!inputs.empty(), name, ": the input list is empty");
  TORCH_CHECK_VALUE(outputs.size() == static_cast<std::size_t>(size), name,
                    ": there must be one list of outputs for each of ", size, " ranks, not ",
                    outputs.size());
  for (const at::Tensor& input : inputs) check_tensor(name, input);
  for (const std::vector<at::Tensor>& of_rank : outputs) {
    check_pairs(name, of_rank, inputs);
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      check_tensor(name, of_rank[i]);
      check_like(name, of_rank[i], inputs[i]);
    }
  }
}

void check_dtypes(const char* name, const at::Tensor& output, const at::Tensor& input) {
  check_tensor(name, output);
  check_tensor(name, input);
  TORCH_CHECK_TYPE(output.scalar_type() == input.scalar_type(), name,
                   ": input and output must have one dtype, not ", dtype_name(input.scalar_type()),
                   " and ", dtype_name(output.scalar_type()));
}

void check_list(const char* name, const std::vector<at::Tensor>& tensors, int size) {
  TORCH_CHECK_VALUE(tensors.size() == static_cast<std::size_t>(size), name,
                    ": the list must have one tensor for each of ", size, " ranks, not ",
                    tensors.size());
  for (const at::Tensor& tensor : tensors) check_tensor(name, tensor);
}

void check_equal_splits(const char* name, const at::Tensor& tensor, int size) {
  check_tensor(name, tensor);
  TORCH_CHECK_VALUE(tensor.dim() > 0, name, ": a tensor with no dimension cannot be split");
  TORCH_CHECK_VALUE(tensor.size(0) % size == 0, name, ": the first dimension, ", tensor.size(0),
                    ", must be a multiple of the ", size, " ranks");
}

std::vector<std::int64_t> check_splits(const char* name, const char* which,
                                       const at::Tensor& tensor,
                                       const std::vector<std::int64_t>& splits, int size) {
  if (splits.empty()) {
    check_equal_splits(name, tensor, size);
    return std::vector<std::int64_t>(static_cast<std::size_t>(size), tensor.numel() / size);
  }
  TORCH_CHECK_VALUE(tensor.dim() > 0, name, ": a tensor with no dimension cannot be split");
  TORCH_CHECK_VALUE(splits.size() == static_cast<std::size_t>(size), name, ": ", splits.size(), " ",
                    which, " split sizes for ", size, " ranks");
  const std::int64_t length = tensor.size(0);
  const std::int64_t each = length == 0 ? 0 : tensor.numel() / length;
  std::vector<std::int64_t> elements;
  std::int64_t left = length;
  for (const std::int64_t split : splits) {
    TORCH_CHECK_VALUE(split >= 0 && split <= left, name, ": the ", which, " split sizes ",
                      at::IntArrayRef(splits), " do not add up to the first dimension of the ",
                      which, ", ", length);
    left -= split;
    elements.push_back(split * each);
  }
  TORCH_CHECK_VALUE(left == 0, name, ": the ", which, " split sizes ", at::IntArrayRef(splits),
                    " do not add up to the first dimension of the ", which, ", ", length);
  return elements;
}

void check_tag(const char* name, int tag) {
  TORCH_CHECK_VALUE(tag >= 0, name, ": the tag must not be negative, such as ", tag);
}

void check_rank(const char* name, std::int64_t rank, int size) {
  TORCH_CHECK_VALUE(rank >= 0 && rank < size, name, ": rank ", rank, " is not one of 0 to ",
                    size - 1);
}

}  // namespace pycollective::shim
