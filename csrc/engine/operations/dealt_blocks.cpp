#include "engine/operations/dealt_blocks.h"

#include <algorithm>

#include "engine/shards.h"

namespace pycollective {
namespace {

constexpr std::size_t kChunk = std::size_t{64} << 10;  // elements that are rounded at once

}  // namespace

DealtBlocks::DealtBlocks(Group& group, const Task& task, std::uint64_t sequence)
    : Operation(group, task, sequence),
      of_rows_(request_),
      task_of_rows_(task_.with(of_rows_)),
      round_(find_kernels(request_.dtype, ReduceOp::kSum, active_simd_level()).combine) {
  set_request();
  inner_ = &direct_.make(group, task_of_rows_, sequence);
}

void DealtBlocks::set_request() {
  const int rank = group_.world().rank;
  const OperationTraits& traits = traits_of(request_.kind);
  float* row = request_.nodes->rows[0];
  of_rows_.dtype = Dtype::kFloat32;
  of_rows_.input = row;
  count_ = elements_of(traits.output, request_, rank, group_.size());
  if (request_.dtype == Dtype::kFloat32) return;
  if (!has(traits.output, rank, request_.root)) return;
  if (traits.output.holds == Holds::kShard) row += Shards(request_, group_.size()).begin(rank);
  of_rows_.output = row;
  results_ = row;
}

void DealtBlocks::start() { inner_->start(); }

State DealtBlocks::advance() {
  if (!reduced_) {
    const State state = inner_->advance();
    if (state != State::kDone) return state;
    reduced_ = true;
  }
  if (results_ == nullptr || rounded_ == count_) return State::kDone;
  const std::size_t some = std::min(kChunk, count_ - rounded_);
  const Combination what = {&kRecipeTake, 1, 1, 1, true};
  const Term term = {results_ + rounded_, true};
  const FloatEnvironment ieee;
  auto* out = static_cast<std::byte*>(request_.output) + rounded_ * size_of(request_.dtype);
  round_(what, &term, out, nullptr, some);
  rounded_ += some;
  return rounded_ == count_ ? State::kDone : State::kProgressed;
}

bool DealtBlocks::is_short() const { return inner_->is_short(); }
bool DealtBlocks::finished_by(Member member) const { return inner_->finished_by(member); }
void DealtBlocks::compare_calls() const { inner_->compare_calls(); }
bool DealtBlocks::called_by(Member member) const { return inner_->called_by(member); }

}  // namespace pycollective
