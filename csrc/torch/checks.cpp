#include "torch/checks.h"

namespace pycollective::shim {

std::string dtype_name(at::ScalarType dtype) {
  return c10::str("torch.", c10::getDtypeNames(dtype).first);
}

void check_tensor(const char* name, const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.defined(), name, ": a tensor is undefined");
  TORCH_CHECK_NOT_IMPLEMENTED(
      tensor.device().is_cpu(), name, ": the pycollective backend takes CPU tensors, not one on ",
      tensor.device(), "; use init_process_group(\"cpu:pycollective,cuda:nccl\") for both");
  TORCH_CHECK_NOT_IMPLEMENTED(tensor.layout() == at::kStrided, name,
                              ": the pycollective backend takes dense tensors, not ",
                              tensor.layout(), "; use to_dense(), or gather indices and values");
}

const at::Tensor& only(const char* name, const std::vector<at::Tensor>& tensors) {
  TORCH_CHECK_VALUE(tensors.size() == 1, name, ": one tensor a rank, not ", tensors.size());
  check_tensor(name, tensors.front());
  return tensors.front();
}

void check_one_a_rank(const char* name, const std::vector<at::Tensor>& tensors, int size,
                      const at::Tensor& like) {
  TORCH_CHECK_VALUE(tensors.size() == static_cast<std::size_t>(size), name,
                    ": the list must have one tensor for each of ", size, " ranks, not ",
                    tensors.size());
  for (const at::Tensor& tensor : tensors) {
    check_tensor(name, tensor);
    TORCH_CHECK_TYPE(tensor.scalar_type() == like.scalar_type(), name,
                     ": the tensors must have one dtype, not ", dtype_name(like.scalar_type()),
                     " and ", dtype_name(tensor.scalar_type()));
    TORCH_CHECK_VALUE(tensor.sizes() == like.sizes(), name,
                      ": the tensors must have one shape, not ", like.sizes(), " and ",
                      tensor.sizes(), "; pad them to equal shapes, or use send and recv");
  }
}

const std::vector<at::Tensor>& one_a_rank(const char* name,
                                          const std::vector<std::vector<at::Tensor>>& lists,
                                          int size, const at::Tensor& like) {
  TORCH_CHECK_VALUE(lists.size() == 1, name, ": one list of tensors, not ", lists.size());
  check_one_a_rank(name, lists.front(), size, like);
  return lists.front();
}

void check_shards(const char* name, const at::Tensor& all, const at::Tensor& shard, int size) {
  check_tensor(name, all);
  check_tensor(name, shard);
  TORCH_CHECK_TYPE(all.scalar_type() == shard.scalar_type(), name,
                   ": input and output must have one dtype, not ", dtype_name(shard.scalar_type()),
                   " and ", dtype_name(all.scalar_type()));
  TORCH_CHECK_VALUE(all.numel() == shard.numel() * size, name, ": a tensor for all of ", size,
                    " ranks must hold ", size, " times the ", shard.numel(),
                    " elements of the tensor for one, not ", all.numel());
}

void check_pairs(const char* name, const std::vector<at::Tensor>& outputs,
                 const std::vector<at::Tensor>& inputs) {
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(), name, ": as many outputs as inputs, not ",
                    outputs.size(), " and ", inputs.size());
}

void check_equal_splits(const char* name, const at::Tensor& tensor,
                        const std::vector<std::int64_t>& splits, int size) {
  check_tensor(name, tensor);
  TORCH_CHECK_VALUE(tensor.dim() > 0, name, ": a tensor with no dimension cannot be split");
  const std::int64_t length = tensor.size(0);
  if (splits.empty()) {
    TORCH_CHECK_VALUE(length % size == 0, name, ": the first dimension, ", length,
                      ", must be a multiple of the ", size, " ranks");
    return;
  }
  TORCH_CHECK_VALUE(splits.size() == static_cast<std::size_t>(size), name, ": ", splits.size(),
                    " split sizes for ", size, " ranks");
  for (const std::int64_t split : splits)
    TORCH_CHECK_NOT_IMPLEMENTED(split * size == length, name,
                                ": the pycollective backend has no unequal split sizes yet, such "
                                "as ",
                                at::IntArrayRef(splits), " of ", length,
                                "; pad to equal ones, or use send and recv");
}

void check_no_tag(const char* name, int tag) {
  TORCH_CHECK_NOT_IMPLEMENTED(tag == 0, name,
                              ": the pycollective backend has no tags yet, such as ", tag,
                              "; messages from one rank to another arrive in the order sent");
}

void check_rank(const char* name, std::int64_t rank, int size) {
  TORCH_CHECK_VALUE(rank >= 0 && rank < size, name, ": rank ", rank, " is not one of 0 to ",
                    size - 1);
}

}  // namespace pycollective::shim
