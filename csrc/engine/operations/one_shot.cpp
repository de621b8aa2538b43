#include "engine/operations/one_shot.h"

#include <algorithm>

#include "engine/shards.h"
#include "kernels/kernels.h"
#include "kernels/prefetching.h"

namespace pycollective {
namespace {

// Beyond this many bytes read by each rank, splitting the reduction among the ranks is faster.
constexpr std::size_t kMostTraffic = std::size_t{128} << 10;

// Less is written by plain stores.
constexpr std::size_t kLeastMeasured = std::size_t{4} << 10;

// A rank's input.
struct Contribution {
  bool given;  // by this rank
  std::size_t bytes;
};

Contribution contribution(const Request& request, int rank, int ranks) {
  const Buffer& input = traits_of(request.kind).input;
  const std::size_t elements = elements_held(input.holds, request, rank, ranks);
  return {has(input, rank, request.root), elements * size_of(request.dtype)};
}

}  // namespace

bool OneShot::fits(const Group& group, const Request& request) {
  if (group.size() == 1) return true;  // nothing to share, whatever the size
  std::size_t bytes = 0;
  if (request.counts.empty()) {
    bytes = contribution(request, request.root, group.size()).bytes;
  } else {
    for (int r = 0; r < group.size(); ++r)
      bytes = std::max(bytes, contribution(request, r, group.size()).bytes);
  }
  if (bytes > small_buffer_bytes(group.data_bytes())) return false;
  return request.kind != OpKind::kAllReduce ||
         bytes * static_cast<std::size_t>(group.size()) <= kMostTraffic;
}

void OneShot::start() {
  if (group_.size() > 1) share(group_, request_, sequence_);
  arrival_.arrive();
}

void OneShot::share(Group& group, const Request& request, std::uint64_t sequence) {
  const Member me = group.me();
  const Contribution mine = contribution(request, me.index(), group.size());
  if (!mine.given) return;
  const auto* input = static_cast<const std::byte*>(request.input);
  std::byte* const buffer = buffer_of(group, me, sequence);
  // Nobody else wants the own shard.
  std::size_t begin = mine.bytes;
  std::size_t end = mine.bytes;
  if (traits_of(request.kind).input.holds == Holds::kAllShards) {
    const Shards shards(request, group.size());
    begin = shards.begin(me.index()) * size_of(request.dtype);
    end = begin + shards.length(me.index()) * size_of(request.dtype);
  }
  const std::size_t bytes = begin + mine.bytes - end;
  Chooser& stores = group.small_stores(request.kind);
  const bool measured = bytes >= kLeastMeasured;
  const bool streams = measured && stores.next();
  CallTimer timer;
  if (measured) timer.begin();
  copy_for_peers(streams, buffer, input, begin);
  copy_for_peers(streams, buffer + begin, input + end, mine.bytes - end);
  if (measured) timer.end(stores, streams, bytes);
}

State OneShot::advance() {
  if (!arrival_.complete()) return State::kBlocked;
  finish();
  return State::kDone;
}

const std::byte* OneShot::shard_for_me(Member from, const Shards& shards) const {
  const int me = group_.me().index();
  const std::size_t size = size_of(request_.dtype);
  const std::size_t begin = shards.begin(me) * size;
  if (from == group_.me()) return static_cast<const std::byte*>(request_.input) + begin;
  return buffer_of(from) + begin - (me > from.index() ? shards.length(from.index()) * size : 0);
}

void OneShot::reduce(const void* const* leaves, std::size_t count) {
  if (count == 0) return;
  const FloatEnvironment ieee;
  find_kernels(request_.dtype, request_.reduce_op, active_simd_level())
      .reduce(leaves, group_.size(), divisor_of(request_, group_.size()), request_.output, nullptr,
              count);
}

void OneShot::finish() {
  const Member me = group_.me();
  const std::size_t size = size_of(request_.dtype);
  auto* output = static_cast<std::byte*>(request_.output);
  const void* leaves[kMaxMembers];
  switch (request_.kind) {
    case OpKind::kAllReduce:
    case OpKind::kReduce:
      if (request_.kind == OpKind::kReduce && me != root()) return;
      for (const Member each : group_.members()) leaves[each.at()] = buffer_of(each);
      // The own leaf from the input: likelier in cache than the copy.
      leaves[me.at()] = request_.input;
      return reduce(leaves, request_.count);
    case OpKind::kBroadcast:
      if (me != root()) copy_bytes(output, buffer_of(root()), request_.count * size);
      return;
    case OpKind::kBarrier:
      return;
    default:
      break;
  }
  const Shards shards(request_, group_.size());
  switch (request_.kind) {
    case OpKind::kReduceScatter:
      for (const Member each : group_.members()) leaves[each.at()] = shard_for_me(each, shards);
      return reduce(leaves, shards.length(me.index()));
    case OpKind::kScatter:
      return copy_bytes(output, shard_for_me(root(), shards), shards.length(me.index()) * size);
    case OpKind::kGather:
      if (me != root()) return;
      [[fallthrough]];
    case OpKind::kAllGather:
      for (const Member each : group_.members())
        copy_bytes(output + shards.begin(each.index()) * size,
                   each == me ? static_cast<const std::byte*>(request_.input) : buffer_of(each),
                   shards.length(each.index()) * size);
      return;
    case OpKind::kAllToAll:
      for (const Member each : group_.members())
        copy_bytes(output + shards.begin(each.index()) * size, shard_for_me(each, shards),
                   shards.length(me.index()) * size);
      return;
    default:
      return;
  }
}

}  // namespace pycollective
