#include "engine/operations/shared_reduce.h"

#include <cstdint>

#include "engine/operations/input_place.h"
#include "engine/watch.h"

namespace pycollective {
namespace {

// After each chunk a rank looks for failures of others.
constexpr std::size_t kChunk = std::size_t{128} << 10;

}  // namespace

SharedReduce::SharedReduce(Group& group, const Task& task, std::uint64_t sequence)
    : Operation(group, task, sequence),
      arrival_(group, task, sequence),
      shards_(*task.request, group.size()),
      reduce_(
          find_kernels(task.request->dtype, task.request->reduce_op, active_simd_level()).reduce),
      element_(size_of(task.request->dtype)),
      part_(kChunk / element_),
      chunks_((shards_.longest() + part_ - 1) / part_),
      base_(group.own().progress.combined.load(std::memory_order_relaxed)) {}

void SharedReduce::start() {
  arrival_.arrive(place_in_array(group_, request_.input, input_bytes()));
}

bool SharedReduce::begin() {
  for (const Member each : group_.members())
    if (!in_shared_array(arrival_.input_of(each))) return false;
  for (const Member each : group_.members())
    inputs_[each.at()] = find_in_array(group_, each, arrival_.input_of(each), 0, input_bytes());
  return true;
}

State SharedReduce::advance() {
  if (two_shot_) return two_shot_->advance();
  switch (stage_) {
    case Stage::kArrival:
      if (!arrival_.complete()) return State::kBlocked;
      if (!begin()) {
        two_shot_.emplace(group_, task_, sequence_);  // which finds that all have arrived
        return two_shot_->advance();
      }
      stage_ = Stage::kReduce;
      [[fallthrough]];
    case Stage::kReduce:
      if (reduced_ < chunks_) reduce_chunk();
      if (reduced_ < chunks_) return State::kProgressed;
      group_.publish(group_.own().progress.combined, base_ + 1);
      stage_ = Stage::kWait;
      [[fallthrough]];
    case Stage::kWait:
      for (const Member each : group_.members())
        if (!has_read(each)) return State::kBlocked;
  }
  // A rank that has failed has told this one before it lets its caller change what was read here.
  Watch::throw_if_failed(*this);
  return State::kDone;
}

void SharedReduce::reduce_chunk() {
  const int me = group_.me().index();
  const Range part = shards_.part(me, reduced_++, part_);
  if (part.length == 0) return;
  const void* leaves[kMaxMembers];
  for (const Member each : group_.members())
    leaves[each.at()] = inputs_[each.at()] + part.begin * element_;
  const FloatEnvironment ieee;
  reduce_(leaves, group_.size(), divisor_of(request_, group_.size()),
          static_cast<std::byte*>(request_.output) + (part.begin - shards_.begin(me)) * element_,
          nullptr, part.length);
}

bool SharedReduce::finished_by(Member member) const {
  if (two_shot_) return two_shot_->finished_by(member);
  return arrival_.arrived(member) && has_read(member);
}

}  // namespace pycollective
