// Checks of c10d calls. They raise before anything moves; `name` is the operation's.
#pragma once

#include <ATen/ATen.h>

#include <string>
#include <vector>

namespace pycollective::shim {

// "torch.bfloat16"
std::string dtype_name(at::ScalarType dtype);

// A strided CPU tensor.
void check_tensor(const char* name, const at::Tensor& tensor);

// The only tensor of a list: c10d's lists are one tensor a device, and a rank has one device.
const at::Tensor& only(const char* name, const std::vector<at::Tensor>& tensors);

// One tensor for each of `size` ranks, with the shape and dtype of `like`.
const std::vector<at::Tensor>& one_a_rank(const char* name,
                                          const std::vector<std::vector<at::Tensor>>& lists,
                                          int size, const at::Tensor& like);

// `all` holds `size` shards like `shard`, whatever their shapes, and has its dtype.
void check_shards(const char* name, const at::Tensor& all, const at::Tensor& shard, int size);

// As many outputs as inputs.
void check_pairs(const char* name, const std::vector<at::Tensor>& outputs,
                 const std::vector<at::Tensor>& inputs);

// A list of outputs for each of `size` ranks, which has one tensor like each input, in their order.
void check_coalesced(const char* name, const std::vector<std::vector<at::Tensor>>& outputs,
                     const std::vector<at::Tensor>& inputs, int size);

// Input and output of one dtype; both checked as above.
void check_dtypes(const char* name, const at::Tensor& output, const at::Tensor& input);

// One tensor for each of `size` ranks, of any shapes.
void check_list(const char* name, const std::vector<at::Tensor>& tensors, int size);

// The first dimension can be cut into equal parts, one a rank.
void check_equal_splits(const char* name, const at::Tensor& tensor, int size);

// How many elements each rank's part has: of the first dimension what `splits` say, or equal parts
// where they say nothing. `which`: "input" or "output".
std::vector<std::int64_t> check_splits(const char* name, const char* which,
                                       const at::Tensor& tensor,
                                       const std::vector<std::int64_t>& splits, int size);

void check_tag(const char* name, int tag);

void check_rank(const char* name, std::int64_t rank, int size);

}  // namespace pycollective::shim
