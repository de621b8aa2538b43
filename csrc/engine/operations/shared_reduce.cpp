#include "engine/operations/shared_reduce.h"

#include <algorithm>
#include <cstdint>

#include "engine/operations/input_place.h"
#include "engine/watch.h"

namespace pycollective {
namespace {

// Results are fetched while they lie in the cache of the rank that has made them.
constexpr std::size_t kLargestPart = std::size_t{128} << 10;
constexpr std::size_t kSmallestPart = std::size_t{8} << 10;
constexpr std::size_t kFewestChunks = 4;

}  // namespace

SharedReduce::SharedReduce(Group& group, const Task& task, std::uint64_t sequence)
    : Operation(group, task, sequence),
      arrival_(group, task, sequence),
      shards_(*task.request, group.size()),
      reduce_(
          find_kernels(task.request->dtype, task.request->reduce_op, active_simd_level()).reduce),
      element_(size_of(task.request->dtype)),
      part_(std::clamp(shards_.longest() * element_ / kFewestChunks, kSmallestPart, kLargestPart) /
            kLine * kLine / element_),
      chunks_((shards_.longest() + part_ - 1) / part_),
      base_(group.own().progress.combined.load(std::memory_order_relaxed)) {}

std::uint64_t SharedReduce::input_word() const {
  // Peers fetch results where the leaves were.
  const bool in_place = request_.kind != OpKind::kAllReduce || request_.output == request_.input;
  return in_place ? place_of(group_, request_.input, input_bytes(), kUnreadable) : kUnreadable;
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
      stage_ = Stage::kWork;
      [[fallthrough]];
    case Stage::kWork: {
      const bool combined = combine();
      const bool fetched = fetch();
      if (combined_ < chunks_ || fetched_ < chunks_)
        return combined || fetched ? State::kProgressed : State::kBlocked;
      group_.publish(group_.own().progress.copied_in, base_ + chunks_);
      stage_ = Stage::kWait;
      [[fallthrough]];
    }
    case Stage::kWait:
      if (!all_have_read()) return State::kBlocked;
  }
  // A rank that has failed has told this one before it lets its caller change what was read here.
  Watch::throw_if_failed(*this);
  return State::kDone;
}

bool SharedReduce::combine() {
  if (combined_ == chunks_) return false;
  const Member me = group_.me();
  const Range part = shards_.part(me.index(), combined_, part_);
  if (part.length != 0) {
    const void* leaves[kMaxMembers];
    for (const Member each : group_.members())
      leaves[each.at()] = inputs_[each.at()] + part.begin * element_;
    const std::size_t to =
        request_.kind == OpKind::kAllReduce ? part.begin : part.begin - shards_.begin(me.index());
    const FloatEnvironment ieee;
    reduce_(leaves, group_.size(), static_cast<std::byte*>(request_.output) + to * element_,
            nullptr, part.length);
  }
  group_.publish(group_.own().progress.combined, base_ + ++combined_);
  return true;
}

bool SharedReduce::fetch() {
  if (request_.kind != OpKind::kAllReduce) fetched_ = chunks_;
  if (fetched_ == chunks_) return false;
  const int first = peer_;
  for (; peer_ < group_.size(); ++peer_) {
    const Member each = group_.after_me(peer_);
    if (group_.mailbox(each).progress.combined.load(std::memory_order_acquire) <= base_ + fetched_)
      return peer_ != first;
    const Range part = shards_.part(each.index(), fetched_, part_);
    copy_bytes(static_cast<std::byte*>(request_.output) + part.begin * element_,
               inputs_[each.at()] + part.begin * element_, part.length * element_);
  }
  peer_ = 1;
  ++fetched_;
  return true;
}

bool SharedReduce::all_have_read() const {
  for (const Member each : group_.members())
    if (!has_read(each)) return false;
  return true;
}

bool SharedReduce::finished_by(Member member) const {
  if (two_shot_) return two_shot_->finished_by(member);
  return arrival_.arrived(member) && has_read(member);
}

}  // namespace pycollective
