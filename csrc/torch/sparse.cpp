// The all-reduce of sparse tensors, with the bits of dense ones: a missing element counts as 0.
//
//   1. All ranks gather shape, dtype and number of elements: 152 bytes.
//   2. They gather all indices, a number each: 8 bytes an element and rank.
//   3. Each puts its values into a block with a row for every index of any rank; they reduce the
//   block.
//
// Each step needs the results of the one before. So an asynchronous call, too, is done when it
// returns: calls issued after it must come after all three steps on every rank.
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <array>

#include "torch/backend.h"
#include "torch/checks.h"
#include "torch/errors.h"
#include "torch/work.h"

namespace pycollective::shim {
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
  Transfer done(OpKind::kAllReduce, kTitle, opts.timeout);
  done.gives(tensor);
  return c10::make_intrusive<Work>(rank_, c10d::OpType::ALLREDUCE, sequence,
                                   AsyncCall::finished(std::move(done)),
                                   std::vector<std::shared_ptr<pycollective::Work>>());
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
