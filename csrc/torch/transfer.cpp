#include "torch/transfer.h"

#include <ATen/MemoryOverlap.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <optional>
#include <utility>

#include "torch/checks.h"

namespace pycollective::shim {
namespace {

// Nothing for dtypes that the contract does not have. Torch's names are the table's.
std::optional<Dtype> core_dtype(at::ScalarType dtype) {
  static const auto known = [] {
    std::array<std::optional<Dtype>, static_cast<std::size_t>(at::ScalarType::NumOptions)> found;
    for (const DtypeTraits& row : kDtypeTable) {
      const auto torchs = c10::getStringToDtypeMap().find(row.name);
      if (torchs != c10::getStringToDtypeMap().end())
        found[static_cast<std::size_t>(torchs->second)] = row.dtype;
    }
    return found;
  }();
  return known.at(static_cast<std::size_t>(dtype));
}

bool is_plain_memory(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg() &&
         !tensor._is_zerotensor();
}

// Equal plain tensors that follow each other in memory are one buffer.
bool is_one_buffer(const std::vector<at::Tensor>& tensors) {
  const auto* next = static_cast<const std::byte*>(tensors.front().const_data_ptr());
  for (const at::Tensor& tensor : tensors) {
    if (!is_plain_memory(tensor) || tensor.const_data_ptr() != next) return false;
    next += tensor.nbytes();
  }
  return true;
}

at::Tensor staging(at::ScalarType dtype, std::int64_t count) {
  return at::empty({count}, at::TensorOptions(at::kCPU).dtype(dtype));
}

at::Tensor copy_of(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  at::Tensor copy = staging(tensor.scalar_type(), tensor.numel());
  copy.view(tensor.sizes()).copy_(tensor);
  return copy;
}

using Span = std::pair<std::uintptr_t, std::uintptr_t>;  // the first byte, and the one behind

Span span_of(const at::Tensor& tensor) {
  const auto begin = reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr());
  if (tensor.numel() == 0) return {begin, begin};
  std::int64_t last = 0;
  for (std::int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  return {begin, begin + static_cast<std::size_t>(last + 1) * tensor.element_size()};
}

}  // namespace

Transfer::Transfer(OpKind kind, const char* profiling_title, std::chrono::milliseconds timeout)
    : profiling_title_(profiling_title) {
  like_.kind = kind;
  // Not positive: unset, the group's own timeout.
  if (timeout.count() > 0) like_.timeout = std::chrono::duration<double>(timeout).count();
}

const char* Transfer::name() const { return std::strchr(profiling_title_, ':') + 1; }

void Transfer::reduce_by(const c10d::ReduceOp& op) {
  using Theirs = c10d::ReduceOp;
  constexpr std::pair<Theirs::RedOpType, ReduceOp> kKnown[] = {
      {Theirs::SUM, ReduceOp::kSum},      {Theirs::AVG, ReduceOp::kAvg},
      {Theirs::PRODUCT, ReduceOp::kProd}, {Theirs::MIN, ReduceOp::kMin},
      {Theirs::MAX, ReduceOp::kMax},      {Theirs::BAND, ReduceOp::kBand},
      {Theirs::BOR, ReduceOp::kBor},      {Theirs::BXOR, ReduceOp::kBxor}};
  for (const auto& [theirs, ours] : kKnown) {
    if (op.op_ != theirs) continue;
    like_.reduce_op = ours;
    return;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(op.op_ != Theirs::PREMUL_SUM, name(),
                              ": ReduceOp.PREMUL_SUM is not supported; use AVG, or scale and SUM");
  TORCH_CHECK_NOT_IMPLEMENTED(false, name(), ": reduce op number ", static_cast<int>(op.op_),
                              " is not known");
}

std::unique_ptr<at::RecordFunction> Transfer::profile() const {
  if (!at::hasCallbacks()) return nullptr;
  auto profile = std::make_unique<at::RecordFunction>(at::RecordScope::USER_SCOPE);
  if (!profile->isActive()) return nullptr;
  profile->_setAsync();
  profile->before(profiling_title_, c10::ArrayRef<const c10::IValue>(shown_.data(), shown_.size()));
  return profile;
}

// Notes an input for the profiler; of a receive, its output.
void Transfer::show(const at::Tensor& tensor) {
  if (at::hasCallbacks()) shown_.emplace_back(tensor);
}

const void* Transfer::read(const at::Tensor& tensor) {
  show(tensor);
  inputs_.push_back(is_plain_memory(tensor) ? tensor : copy_of(tensor));
  return inputs_.back().const_data_ptr();
}

std::vector<const void*> Transfer::read_apart(const std::vector<at::Tensor>& tensors,
                                              const std::vector<at::Tensor>& outputs) {
  // Sorted by their beginnings, each with the farthest end up to it.
  std::vector<Span> written;
  for (const at::Tensor& output : outputs) written.push_back(span_of(output));
  std::sort(written.begin(), written.end());
  for (std::size_t i = 1; i < written.size(); ++i)
    written[i].second = std::max(written[i].second, written[i - 1].second);
  std::vector<const void*> from;
  for (const at::Tensor& tensor : tensors) {
    const Span own = span_of(tensor);
    const auto behind = std::lower_bound(written.begin(), written.end(), Span{own.second, 0});
    const bool overlaps = behind != written.begin() && std::prev(behind)->second > own.first;
    if (!overlaps || own.first == own.second) {
      from.push_back(read(tensor));
      continue;
    }
    show(tensor);
    inputs_.push_back(copy_of(tensor));
    from.push_back(inputs_.back().const_data_ptr());
  }
  return from;
}

void* Transfer::write(const at::Tensor& tensor) {
  if (like_.kind == OpKind::kRecv) show(tensor);
  outputs_.push_back(tensor);
  if (is_plain_memory(tensor)) return tensor.mutable_data_ptr();
  at::assert_no_internal_overlap(tensor);
  copies_.emplace_back(tensor, staging(tensor.scalar_type(), tensor.numel()).view(tensor.sizes()));
  return copies_.back().second.mutable_data_ptr();
}

void* Transfer::update(const at::Tensor& tensor) {
  show(tensor);
  outputs_.push_back(tensor);
  if (is_plain_memory(tensor)) return tensor.mutable_data_ptr();
  at::assert_no_internal_overlap(tensor);
  copies_.emplace_back(tensor, copy_of(tensor).view(tensor.sizes()));
  return copies_.back().second.mutable_data_ptr();
}

const void* Transfer::read(const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& tensor : tensors) show(tensor);
  if (is_one_buffer(tensors)) {
    inputs_.insert(inputs_.end(), tensors.begin(), tensors.end());
    return tensors.front().const_data_ptr();
  }
  const at::NoGradGuard no_grad;
  const std::int64_t each = tensors.front().numel();
  at::Tensor all =
      staging(tensors.front().scalar_type(), each * static_cast<std::int64_t>(tensors.size()));
  std::int64_t begin = 0;
  for (const at::Tensor& tensor : tensors) {
    all.narrow(0, begin, each).view(tensor.sizes()).copy_(tensor);
    begin += each;
  }
  inputs_.push_back(all);
  return all.const_data_ptr();
}

void* Transfer::write(const std::vector<at::Tensor>& tensors) {
  outputs_.insert(outputs_.end(), tensors.begin(), tensors.end());
  if (is_one_buffer(tensors)) return tensors.front().mutable_data_ptr();
  const std::int64_t each = tensors.front().numel();
  at::Tensor all =
      staging(tensors.front().scalar_type(), each * static_cast<std::int64_t>(tensors.size()));
  std::int64_t begin = 0;
  for (const at::Tensor& tensor : tensors) {
    at::assert_no_internal_overlap(tensor);
    copies_.emplace_back(tensor, all.narrow(0, begin, each).view(tensor.sizes()));
    begin += each;
  }
  return all.mutable_data_ptr();
}

void Transfer::add(const void* input, void* output, at::ScalarType dtype, std::int64_t count) {
  Request request = like_;
  request.input = input;
  request.output = output;
  request.count = static_cast<std::size_t>(count);
  const bool by_parts = request.reduce_op == pycollective::ReduceOp::kSum ||
                        request.reduce_op == pycollective::ReduceOp::kAvg;
  if (c10::isComplexType(dtype) && reduces(request.kind) && by_parts) {
    dtype = c10::toRealValueType(dtype);
    request.count *= 2;
  }
  if (const auto known = core_dtype(dtype)) {
    request.dtype = *known;
  } else {
    TORCH_CHECK_TYPE(!reduces(request.kind), name(), ": ", dtype_name(dtype),
                     " cannot be reduced; convert to one of ", list_names(kDtypeTable));
    request.count *= c10::elementSize(dtype);
  }
  requests_.push_back(std::move(request));
}

void Transfer::add_uneven(const void* input, void* output, at::ScalarType dtype,
                          std::vector<std::size_t> counts) {
  add(input, output, dtype, 1);
  Request& request = requests_.back();
  for (std::size_t& each : counts) each *= request.count;  // of the core's elements
  request.counts = std::move(counts);
}

void Transfer::add_all_to_all_v(std::vector<AllToAllVPart> parts, at::ScalarType dtype) {
  add(nullptr, nullptr, dtype, 1);
  Request& request = requests_.back();
  const std::size_t units = std::exchange(request.count, 0);  // bytes, of a dtype without a name
  for (AllToAllVPart& part : parts) {
    part.send_count *= units;
    part.recv_count *= units;
  }
  request.all_to_all_v = std::make_shared<const std::vector<AllToAllVPart>>(std::move(parts));
}

std::shared_ptr<const void> Transfer::keep(
    const Collectives& collectives, const std::shared_ptr<CompletionThreads>& threads) const {
  if (!collectives.wants_keep()) return nullptr;
  auto* tensors = new std::vector<at::Tensor>(inputs_);
  tensors->insert(tensors->end(), outputs_.begin(), outputs_.end());
  for (const auto& [to, from] : copies_) tensors->push_back(from);
  return {tensors, [threads](std::vector<at::Tensor>* kept) {
            // The last to hold a tensor may need the GIL to free it, and this may be the core's
            // thread, which must never wait for that.
            const bool others = std::all_of(kept->begin(), kept->end(), [](const at::Tensor& each) {
              return each.use_count() > 1;
            });
            if (others)
              delete kept;
            else
              threads->post([kept] { delete kept; });
          }};
}

void Transfer::copy_back() {
  for (const auto& [to, from] : copies_) {
    const c10::InferenceMode as_the_tensor_was_made(to.is_inference());
    const at::NoGradGuard no_grad;
    to.copy_(from);
  }
  copies_.clear();
}

}  // namespace pycollective::shim
