#include "engine/operations/single_copy.h"

#include <algorithm>
#include <cerrno>
#include <stdexcept>

#include "engine/operations/input_place.h"
#include "engine/operations/one_shot.h"
#include "engine/watch.h"

namespace pycollective {
namespace {

// Below this many bytes for a rank all ranks copy into small buffers, also from shared arrays: that
// needs no wait at the end.
constexpr std::size_t kLeastBytes = std::size_t{2} << 10;
// After each piece of so many bytes a rank looks for failures of others.
constexpr std::size_t kCopyPiece = std::size_t{512} << 10;
constexpr std::size_t kReducePiece = std::size_t{128} << 10;

}  // namespace

bool SingleCopy::fits(const Group& group, const Request& request) {
  if (group.size() == 1) return false;
  if (request.kind == OpKind::kReduceScatter) return !OneShot::fits(group, request);
  if (reduces(request.kind)) return false;
  return Shards(request, group.size()).longest() * size_of(request.dtype) >= kLeastBytes;
}

SingleCopy::SingleCopy(Group& group, const Task& task, std::uint64_t sequence)
    : Operation(group, task, sequence),
      arrival_(group, task, sequence),
      shards_(*task.request, group.size()),
      element_(size_of(task.request->dtype)),
      paths_(group.ways(task.request->kind, shards_.whole() * element_).paths),
      base_(group.own().progress.combined.load(std::memory_order_relaxed)) {
  if (reduces(request_.kind))
    reduce_ = find_kernels(request_.dtype, request_.reduce_op, active_simd_level()).reduce;
}

std::uint64_t SingleCopy::input_word() {
  bool may_read = group_.reading() != Group::Reading::kForbidden;
  if (group_.reading() == Group::Reading::kUnknown)
    for (const Member each : group_.members()) may_read = may_read && group_.may_read(each);
  const bool slots = group_.me().index() == 0 && paths_.next();
  return input_place() | (may_read ? 0 : kMayNotRead) | (slots ? kThroughSlots : 0);
}

std::uint64_t SingleCopy::input_place() {
  const std::size_t bytes = element_ * elements_of(traits_of(request_.kind).input, request_,
                                                   group_.me().index(), group_.size());
  if (bytes == 0) return kNoInput;
  // In place, what a peer needs would be overwritten by what it gives.
  const bool overwritten = request_.kind == OpKind::kAllToAll && request_.input == request_.output;
  const std::uint64_t place = place_in_array(group_, request_.input, bytes);
  if ((in_shared_array(place) && !overwritten) || reduces(request_.kind)) return place;
  const bool copies = is_short() || group_.reading() == Group::Reading::kForbidden;
  if (copies && OneShot::fits(group_, request_)) {
    OneShot::share(group_, request_, sequence_);
    return kInSmallBuffer;
  }
  return overwritten ? kUnreadable : reinterpret_cast<std::uintptr_t>(request_.input);
}

void SingleCopy::start() { arrival_.arrive(input_word()); }

bool SingleCopy::begin() {
  bool all_may_read = true;
  bool some_unreadable = false;
  bool some_unmapped = false;
  for (const Member each : group_.members()) {
    const std::uint64_t word = arrival_.input_of(each);
    const std::uint64_t place = word & ~kMarks;
    all_may_read &= (word & kMayNotRead) == 0;
    const bool copied = place == kNoInput || is_in_small_buffer(word);
    must_wait_ |= !copied;
    some_unreadable |= place == kUnreadable;
    some_unmapped |= !copied && !in_shared_array(place);
  }
  group_.set_reading(all_may_read ? Group::Reading::kAllowed : Group::Reading::kForbidden);
  if (!some_unmapped) return true;
  if (!all_may_read || some_unreadable) return false;
  through_slots_ = (arrival_.input_of(Member(0)) & kThroughSlots) != 0;
  measures_ = group_.me().index() == 0;
  timer_.begin();
  return !through_slots_;
}

State SingleCopy::end() {
  if (measures_) timer_.end(paths_, through_slots_, shards_.whole() * element_);
  return State::kDone;
}

bool SingleCopy::is_in_small_buffer(std::uint64_t word) const {
  return (word & ~kMarks) == kInSmallBuffer && OneShot::fits(group_, request_);
}

State SingleCopy::go_on_as_two_shot() {
  two_shot_.emplace(group_, task_, sequence_);  // which finds that all have arrived
  return advance();
}

State SingleCopy::advance() {
  if (two_shot_) {
    const State state = two_shot_->advance();
    return state == State::kDone ? end() : state;
  }
  switch (stage_) {
    case Stage::kArrival:
      if (!arrival_.complete()) return State::kBlocked;
      if (!begin()) return go_on_as_two_shot();
      stage_ = Stage::kCopy;
      [[fallthrough]];
    case Stage::kCopy:
      if (reduces(request_.kind))
        reduce_piece();
      else if (!copy_piece())
        group_.own().progress.copied_in.store(base_ + 1, std::memory_order_relaxed);
      if (step_ < group_.size() && !was_refused()) return State::kProgressed;
      if (!must_wait_) {  // so nobody sleeps until this
        group_.own().progress.combined.store(base_ + 1, std::memory_order_release);
        return State::kDone;
      }
      group_.publish(group_.own().progress.combined, base_ + 1);
      stage_ = Stage::kWait;
      [[fallthrough]];
    case Stage::kWait:
      for (const Member each : group_.members())
        if (!has_read(each)) return State::kBlocked;
  }
  if (was_refused()) return go_on_as_two_shot();  // which counts as what the single copy cost
  // After publish(), and so after all that was read.
  Watch::throw_if_failed(*this);
  return end();
}

bool SingleCopy::was_refused() const {
  for (const Member each : group_.members())
    if (group_.mailbox(each).progress.copied_in.load(std::memory_order_relaxed) > base_)
      return true;
  return false;
}

bool SingleCopy::moves(Member from, Member to) const {
  const OperationTraits& traits = traits_of(request_.kind);
  return has(traits.input, from.index(), request_.root) &&
         has(traits.output, to.index(), request_.root);
}

SingleCopy::Part SingleCopy::part_from(Member member) const {
  const OperationTraits& traits = traits_of(request_.kind);
  const int me = group_.me().index();
  const bool takes_own_shard = traits.input.holds == Holds::kAllShards;
  const int shard = takes_own_shard ? me : member.index();
  return {takes_own_shard ? shards_.begin(me) * element_ : 0,
          traits.output.holds == Holds::kShard ? 0 : shards_.begin(member.index()) * element_,
          shards_.length(shard) * element_};
}

void SingleCopy::reduce_piece() {
  const int me = group_.me().index();
  const std::size_t count = std::min(shards_.length(me) - copied_, kReducePiece / element_);
  if (count != 0) {
    const void* leaves[kMaxMembers];
    for (const Member each : group_.members())
      leaves[each.at()] = find_in_array(group_, each, arrival_.input_of(each),
                                        (shards_.begin(me) + copied_) * element_, count * element_);
    const FloatEnvironment ieee;
    reduce_(leaves, group_.size(), divisor_of(request_, group_.size()),
            static_cast<std::byte*>(request_.output) + copied_ * element_, nullptr, count);
  }
  copied_ += count;
  if (copied_ == shards_.length(me)) step_ = group_.size();
}

bool SingleCopy::copy_piece() {
  for (std::size_t left = kCopyPiece; step_ < group_.size();) {
    const Member from = group_.after_me(step_);
    const Part part = moves(from, group_.me()) ? part_from(from) : Part{};
    const std::size_t bytes = std::min(part.length - copied_, left);
    if (bytes != 0 && !copy_from(from, part, bytes)) return false;
    copied_ += bytes;
    left -= bytes;
    if (copied_ < part.length) return true;
    copied_ = 0;
    ++step_;
  }
  return true;
}

bool SingleCopy::copy_from(Member member, const Part& part, std::size_t bytes) {
  const std::size_t skip = part.from + copied_;
  std::byte* const to = static_cast<std::byte*>(request_.output) + part.to + copied_;
  const std::byte* from = nullptr;
  const std::uint64_t word = arrival_.input_of(member);
  if (member == group_.me()) {
    from = static_cast<const std::byte*>(request_.input) + skip;
  } else if (in_shared_array(word)) {
    from = find_in_array(group_, member, word, skip, bytes);
  } else if (is_in_small_buffer(word)) {
    // All but the giver's own shard.
    const bool behind = part.from != 0 && group_.me().index() > member.index();
    from = OneShot::buffer_of(group_, member, sequence_) + skip -
           (behind ? shards_.length(member.index()) * element_ : 0);
  } else if (!must_wait_) {
    throw std::runtime_error(group_.describe(member) + " has an input, and said that it has none");
  } else {
    const int error = group_.read(member, to, word + skip, bytes);
    if (error == ESRCH) Watch::throw_lost(*this, member);
    return error == 0;
  }
  copy_out(to, from, bytes, shards_.longest() * element_);
  return true;
}

bool SingleCopy::finished_by(Member member) const {
  if (two_shot_) return two_shot_->finished_by(member);
  // Also before this rank has begun: others may have finished since it looked.
  return arrival_.arrived(member) && has_read(member);
}

}  // namespace pycollective
