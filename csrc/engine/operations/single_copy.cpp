#include "engine/operations/single_copy.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>

#include "engine/operations/input_place.h"
#include "engine/operations/one_shot.h"
#include "engine/watch.h"

namespace pycollective {
namespace {

// With fewer bytes for a rank, the system calls cost more than a second copy. (On 2 ranks they
// still cost a quarter more at 16 KiB, and as much at 32 KiB; but of arrays that all map, an
// all-gather of 16 KiB a rank takes 0.7 us this way, and 2.8 us by slots.)
constexpr std::size_t kLeastBytes = std::size_t{16} << 10;
// Of a broadcast each rank needs all. Beyond this much, where it leaves the cache, it is sooner if
// the root's core does its half of the work and copies into slots.
constexpr std::size_t kMostOfBroadcast = std::size_t{512} << 10;
// A process that dies loses its memory before it has ended. (Out of memory, Linux takes it away.)
constexpr int kLooks = 100;
constexpr std::chrono::milliseconds kBetweenLooks{1};

}  // namespace

void copy_from(const Operation& operation, Member member, void* to, std::uint64_t from,
               std::size_t bytes) {
  const Group& group = operation.group();
  const int error = group.read(member, to, from, bytes);
  if (error == 0) return;
  for (int looks = 0; looks < kLooks; ++looks) {
    if (looks > 0) std::this_thread::sleep_for(kBetweenLooks);
    if (error == ESRCH || !group.alive(member)) Watch::throw_lost(operation, member);
    Watch::throw_if_failed(operation);  // then it may have freed its input
  }
  throw std::runtime_error("the memory of " + group.describe(member) +
                           " could not be read: process_vm_readv: " + std::strerror(error) +
                           " (errno " + std::to_string(error) + ")");
}

bool SingleCopy::fits(const Group& group, const Request& request) {
  if (reduces(request.kind) || group.size() == 1) return false;
  if (group.reading() == Group::Reading::kForbidden && OneShot::fits(group, request)) return false;
  return Shards(request, group.size()).longest() * size_of(request.dtype) >= kLeastBytes;
}

SingleCopy::SingleCopy(Group& group, const Task& task, std::uint64_t sequence)
    : Operation(group, task, sequence),
      arrival_(group, task, sequence),
      shards_(*task.request, group.size()),
      element_(size_of(task.request->dtype)),
      base_(group.own().progress.combined.load(std::memory_order_relaxed)) {}

std::uint64_t SingleCopy::input_word() {
  bool may_read = group_.reading() != Group::Reading::kForbidden;
  if (group_.reading() == Group::Reading::kUnknown)
    for (const Member each : group_.members()) may_read = may_read && group_.may_read(each);
  return input_place() | (may_read ? 0 : kMayNotRead);
}

std::uint64_t SingleCopy::input_place() {
  const std::size_t bytes = element_ * elements_of(traits_of(request_.kind).input, request_,
                                                   group_.me().index(), group_.size());
  if (bytes == 0) return kNoInput;
  // In place, what a peer needs would be overwritten by what it gives.
  const bool overwritten = request_.kind == OpKind::kAllToAll && request_.input == request_.output;
  if (overwritten) return kUnreadable;
  const std::uint64_t place = place_of(group_, request_.input, bytes, kUnreadable);
  if (in_shared_array(place) || !is_readable(request_.input, bytes)) return place;
  return reinterpret_cast<std::uintptr_t>(request_.input);
}

void SingleCopy::start() { arrival_.arrive(input_word()); }

bool SingleCopy::begin() {
  bool all_may_read = true;
  bool all_readable = true;
  bool all_mapped = true;
  for (const Member each : group_.members()) {
    const std::uint64_t word = arrival_.input_of(each);
    const std::uint64_t place = word & ~kMayNotRead;
    all_may_read &= place == word;
    all_readable &= place != kUnreadable;
    all_mapped &= place == kNoInput || in_shared_array(place);
  }
  group_.set_reading(all_may_read ? Group::Reading::kAllowed : Group::Reading::kForbidden);
  const bool pays =
      request_.kind != OpKind::kBroadcast || request_.count * element_ <= kMostOfBroadcast;
  return all_mapped || (all_may_read && all_readable && pays);
}

State SingleCopy::advance() {
  if (two_shot_) return two_shot_->advance();
  switch (stage_) {
    case Stage::kArrival:
      if (!arrival_.complete()) return State::kBlocked;
      if (!begin()) {
        two_shot_.emplace(group_, task_, sequence_);  // which finds that all have arrived
        return two_shot_->advance();
      }
      stage_ = Stage::kCopy;
      [[fallthrough]];
    case Stage::kCopy:
      copy_piece();
      if (step_ < group_.size()) return State::kProgressed;
      group_.publish(group_.own().progress.combined, base_ + 1);
      stage_ = Stage::kWait;
      [[fallthrough]];
    case Stage::kWait:
      if (!others_have_read()) return State::kBlocked;
  }
  // After publish(), and so after all that was read.
  Watch::throw_if_failed(*this);
  return State::kDone;
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

void SingleCopy::copy_piece() {
  const Member from = group_.after_me(step_);
  const Part part = moves(from, group_.me()) ? part_from(from) : Part{};
  const std::size_t bytes = std::min(part.length - copied_, kCopyPiece);
  if (bytes != 0) {
    std::byte* to = static_cast<std::byte*>(request_.output) + part.to + copied_;
    if (from == group_.me()) {
      copy_bytes(to, static_cast<const std::byte*>(request_.input) + part.from + copied_, bytes);
    } else if (const std::uint64_t word = arrival_.input_of(from); in_shared_array(word)) {
      copy_bytes(to, find_in_array(group_, from, word, part.from + copied_, bytes), bytes);
    } else {
      copy_from(*this, from, to, word + part.from + copied_, bytes);
    }
  }
  copied_ += bytes;
  if (copied_ < part.length) return;
  copied_ = 0;
  ++step_;
}

bool SingleCopy::others_have_read() const {
  for (const Member each : group_.members())
    if (each != group_.me() && moves(group_.me(), each) && !has_read(each)) return false;
  return true;
}

bool SingleCopy::finished_by(Member member) const {
  if (two_shot_) return two_shot_->finished_by(member);
  if (!arrival_.arrived(member)) return false;
  // Also before this rank has begun: others may have finished since it looked.
  if (stage_ != Stage::kWait && moves(member, group_.me())) return false;
  return !moves(group_.me(), member) || has_read(member);
}

}  // namespace pycollective
