#include "engine/operations/two_shot.h"

#include <algorithm>
#include <utility>

#include "engine/shards.h"

namespace pycollective {
namespace {

// With smaller parts, flags cost more. Larger ones leave the first-level caches before they are
// read; where a slot has a part for each of several peers, four slots leave the second-level one.
constexpr std::size_t kLargestPart = std::size_t{32} << 10;
constexpr std::size_t kLargestOnlyPart = std::size_t{64} << 10;  // where a slot has one
constexpr std::size_t kSmallestPart = std::size_t{8} << 10;
// A message is cut into at least this many chunks, so that copying and combining overlap. (With
// four, one of 128 KiB on two ranks takes a quarter longer.)
constexpr std::size_t kFewestChunks = 2;
// Larger inputs come from memory. While a core waits for lines of a peer's cache, it prefetches
// its own next ones. (Of 64 MiB on two ranks that saves a fifth of the time.)
constexpr std::size_t kInputInCache = std::size_t{2} << 20;
// Of a result that several peers await: stays in the first cache until all have it.
constexpr std::size_t kBlock = 4096;

// Whether owners answer leaves with results.
constexpr bool answers(OpKind kind) {
  return reduces(kind) && traits_of(kind).output.holds != Holds::kShard;
}

}  // namespace

TwoShot::TwoShot(Group& group, const Task& task, std::uint64_t sequence)
    : Operation(group, task, sequence),
      arrival_(group, task, sequence),
      shards_(*task.request, group.size()),
      element_(size_of(task.request->dtype)),
      stores_(group.ways(task.request->kind, shards_.whole() * element_).stores),
      streams_(stores_.next()) {
  const Request& request = *task.request;
  const auto n = static_cast<std::size_t>(group.size());
  const std::size_t parts = only_shares(request.kind) ? 1 : n - 1;  // in a slot
  const std::size_t fits = group.slots_bytes() / (kSlots * parts);
  const std::size_t largest = parts == 1 ? kLargestOnlyPart : kLargestPart;
  const std::size_t wanted =
      std::clamp(shards_.longest() * element_ / kFewestChunks, kSmallestPart, largest);
  part_ = std::max(std::min(fits, wanted) / kLine * kLine, kLine) / element_;
  chunks_ = (shards_.longest() + part_ - 1) / part_;
  prefetches_ = group.may_spin() && shards_.longest() * element_ * n > kInputInCache;
  if (reduces(request.kind))
    reduce_ = find_kernels(request.dtype, request.reduce_op, active_simd_level()).reduce;
}

bool TwoShot::copies_in(Member member) const {
  return !only_shares(request_.kind) &&
         has(traits_of(request_.kind).input, member.index(), request_.root);
}

bool TwoShot::fetches() const {
  const Buffer& output = traits_of(request_.kind).output;
  return output.holds != Holds::kShard && !only_exchanges(request_.kind) &&
         has(output, group_.me().index(), request_.root);
}

bool TwoShot::finished_by(Member member) const {
  // Also before this rank has begun: others may have arrived and finished since it looked.
  const std::uint64_t base = stage_ != Stage::kArrival
                                 ? base_
                                 : group_.own().progress.combined.load(std::memory_order_relaxed);
  return arrival_.arrived(member) &&
         group_.mailbox(member).progress.combined.load(std::memory_order_acquire) >= base + chunks_;
}

std::byte* TwoShot::leaf_slot(Member member, std::size_t chunk, Member owner) const {
  // Without answers each of a pair writes next where it has read what the other wrote.
  if (!answers(request_.kind) && is_odd_lap(chunk)) std::swap(member, owner);
  const auto n = static_cast<std::size_t>(group_.size());
  const std::size_t index = owner.index() < member.index() ? owner.at() : owner.at() - 1;
  return group_.slots(member) + (slot_of(chunk) * (n - 1) + index) * part_ * element_;
}

std::byte* TwoShot::shared_slot(Member member, std::size_t chunk) const {
  if (is_odd_lap(chunk)) member = Member((member.index() + 1) % group_.size());
  return group_.slots(member) + slot_of(chunk) * part_ * element_;
}

State TwoShot::advance() {
  for (;;) {
    switch (stage_) {
      case Stage::kArrival:
        if (!arrival_.complete()) return State::kBlocked;
        if (chunks_ == 0) return State::kDone;
        begin();
        break;
      case Stage::kFetch:
        if (round_ >= 2 && !fetch(round_ - 2)) return State::kBlocked;
        if (round_ == chunks_ + 1) return end();
        stage_ = Stage::kCopyIn;
        break;
      case Stage::kCopyIn:
        if (round_ + 1 < chunks_) copy_in(round_ + 1);
        stage_ = Stage::kCombine;
        break;
      case Stage::kCombine:
        if (round_ < chunks_ && !combine(round_)) return State::kBlocked;
        ++round_;
        stage_ = Stage::kFetch;
        return State::kProgressed;
    }
  }
}

void TwoShot::write(std::byte* slot, const std::byte* from, std::size_t bytes, NextRead next) {
  has_written_ = true;
  copy_for_peers(streams_, slot, from, bytes, next);
}

State TwoShot::end() {
  // From arrival on, so what the kind of store costs the readers counts, too.
  if (has_written_) timer_.end(stores_, streams_, shards_.whole() * element_);
  return State::kDone;
}

void TwoShot::begin() {
  timer_.begin();
  base_ = group_.own().progress.combined.load(std::memory_order_relaxed);
  copy_in(0);
  stage_ = Stage::kFetch;
}

void TwoShot::copy_in(std::size_t chunk) {
  const int n = group_.size();
  const Member me = group_.me();
  if (copies_in(me)) {
    const auto* input = static_cast<const std::byte*>(request_.input);
    for (int step = 1; step < n; ++step) {
      const Member owner = group_.after_me(step);
      const Range part = part_of(owner, chunk);
      write(leaf_slot(me, chunk, owner), input + part.begin * element_, part.length * element_,
            next_input(owner, chunk + 1));
    }
  }
  // Also if nothing was copied: it tells that this rank has fetched up to chunk - 3.
  group_.publish(group_.own().progress.copied_in, base_ + chunk + 1);
}

bool TwoShot::combine(std::size_t chunk) {
  const int n = group_.size();
  for (; peer_ < n; ++peer_) {
    const Member each = group_.after_me(peer_);
    if (group_.mailbox(each).progress.copied_in.load(std::memory_order_acquire) < base_ + chunk + 1)
      return false;
  }
  peer_ = 1;
  if (only_exchanges(request_.kind))
    exchange_part(chunk);
  else if (only_shares(request_.kind))
    share_part(chunk);
  else
    reduce_part(chunk);
  group_.publish(group_.own().progress.combined, base_ + chunk + 1);
  return true;
}

void TwoShot::reduce_part(std::size_t chunk) {
  const Member me = group_.me();
  const Range part = part_of(me, chunk);
  if (part.length == 0) return;
  const void* leaves[kMaxMembers];
  for (const Member each : group_.members()) leaves[each.at()] = leaf_slot(each, chunk, me);
  leaves[me.at()] = static_cast<const std::byte*>(request_.input) + part.begin * element_;

  auto* output = static_cast<std::byte*>(request_.output);
  const double divisor = divisor_of(request_, group_.size());
  const FloatEnvironment ieee;
  switch (request_.kind) {
    case OpKind::kAllReduce:
      return reduce_for_all(leaves, chunk, output + part.begin * element_, part.length);
    case OpKind::kReduceScatter:
      return reduce_(leaves, group_.size(), divisor,
                     output + (part.begin - shards_.begin(me.index())) * element_, nullptr,
                     part.length);
    default:  // reduce: the others have no output
      return reduce_(leaves, group_.size(), divisor,
                     me == root() ? output + part.begin * element_ : leaf_slot(root(), chunk, me),
                     nullptr, part.length);
  }
}

void TwoShot::reduce_for_all(const void* const* leaves, std::size_t chunk, std::byte* output,
                             std::size_t count) {
  const int n = group_.size();
  const double divisor = divisor_of(request_, n);
  const Member me = group_.me();
  if (n == 2 && !streams_)
    return reduce_(leaves, n, divisor, output, leaf_slot(group_.after_me(1), chunk, me), count);
  const std::size_t block = kBlock / element_;
  for (std::size_t at = 0; at < count; at += block) {
    const std::size_t length = std::min(block, count - at);
    const void* here[kMaxMembers];
    for (const Member each : group_.members())
      here[each.at()] = static_cast<const std::byte*>(leaves[each.at()]) + at * element_;
    reduce_(here, n, divisor, output + at * element_, nullptr, length);
    for (int step = 1; step < n; ++step) {
      const auto copy = streams_ ? copy_streaming : copy_bytes;
      copy(leaf_slot(group_.after_me(step), chunk, me) + at * element_, output + at * element_,
           length * element_);
    }
  }
  if (streams_) finish_stores();
}

void TwoShot::exchange_part(std::size_t chunk) {
  const Member me = group_.me();
  const Range part = part_of(me, chunk);
  const std::size_t skip = part.begin - shards_.begin(me.index());
  const auto* input = static_cast<const std::byte*>(request_.input);
  auto* output = static_cast<std::byte*>(request_.output);
  for (int step = 0; step < group_.size(); ++step) {
    const Member from = group_.after_me(step);
    if (!copies_in(from)) continue;
    // all_to_all: equal shards, so what comes from `from` goes where its shard lies.
    const std::size_t to =
        request_.kind == OpKind::kScatter ? skip : shards_.begin(from.index()) + skip;
    copy_out(output + to * element_,
             from == me ? input + part.begin * element_ : leaf_slot(from, chunk, me),
             part.length * element_, shards_.longest() * element_);
  }
}

void TwoShot::share_part(std::size_t chunk) {
  const Member me = group_.me();
  const Range part = part_of(me, chunk);
  const std::size_t bytes = part.length * element_;
  // A broadcast's root owns the whole buffer, a gather's input is the own shard alone.
  const auto* input = static_cast<const std::byte*>(request_.input) +
                      (part.begin - shards_.begin(me.index())) * element_;
  auto* output = static_cast<std::byte*>(request_.output);
  if (bytes == 0) return;
  // What a gather's root gives nobody fetches.
  if (request_.kind != OpKind::kGather || me != root()) write(shared_slot(me, chunk), input, bytes);
  if (fetches())
    copy_out(output + part.begin * element_, input, bytes, shards_.longest() * element_);
}

NextRead TwoShot::next_input(Member owner, std::size_t chunk) const {
  if (!prefetches_) return {};
  const Range part = part_of(owner, chunk);
  return {static_cast<const std::byte*>(request_.input) + part.begin * element_,
          part.length * element_};
}

bool TwoShot::fetch(std::size_t chunk) {
  const int n = group_.size();
  auto* output = static_cast<std::byte*>(request_.output);
  for (; peer_ < n; ++peer_) {
    const Member each = group_.after_me(peer_);
    if (group_.mailbox(each).progress.combined.load(std::memory_order_acquire) < base_ + chunk + 1)
      return false;
    if (!fetches()) continue;
    const Range part = part_of(each, chunk);
    std::byte* const to = output + part.begin * element_;
    const std::size_t bytes = part.length * element_;
    if (answers(request_.kind))
      copy_prefetching(copy_bytes, to, leaf_slot(group_.me(), chunk, each), bytes,
                       next_input(group_.me(), chunk + 2));
    else
      copy_out(to, shared_slot(each, chunk), bytes, shards_.longest() * element_);
  }
  peer_ = 1;
  return true;
}

}  // namespace pycollective
