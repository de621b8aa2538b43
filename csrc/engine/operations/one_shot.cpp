#include "engine/operations/one_shot.h"

#include <algorithm>

#include "engine/operations/shards.h"
#include "kernels/kernels.h"

namespace pycollective {
namespace {

// Beyond this many bytes read by each rank, splitting the reduction among the ranks is faster.
constexpr std::size_t kMostTraffic = std::size_t{128} << 10;

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
  const Contribution mine = contribution(request_, group_.me().index(), group_.size());
  if (mine.given && group_.size() > 1)
    copy_bytes(const_cast<std::byte*>(buffer_of(group_.me())), request_.input, mine.bytes);
  arrival_.arrive();
}

State OneShot::advance() {
  if (!arrival_.complete()) return State::kBlocked;
  finish();
  return State::kDone;
}

void OneShot::reduce(std::size_t begin, std::size_t count) {
  if (count == 0) return;
  const std::size_t skip = begin * size_of(request_.dtype);
  const void* leaves[kMaxMembers];
  for (const Member each : group_.members()) leaves[each.at()] = buffer_of(each) + skip;
  // The own leaf from the input: likelier in cache than the copy.
  leaves[group_.me().at()] = static_cast<const std::byte*>(request_.input) + skip;
  const FloatEnvironment ieee;
  find_kernels(request_.dtype, request_.reduce_op, active_simd_level())
      .reduce(leaves, group_.size(), request_.output, nullptr, count);
}

void OneShot::finish() {
  const Member me = group_.me();
  const std::size_t size = size_of(request_.dtype);
  auto* output = static_cast<std::byte*>(request_.output);
  switch (request_.kind) {
    case OpKind::kAllReduce:
      return reduce(0, request_.count);
    case OpKind::kReduce:
      if (me == root()) reduce(0, request_.count);
      return;
    case OpKind::kBroadcast:
      if (me != root()) copy_bytes(output, buffer_of(root()), request_.count * size);
      return;
    case OpKind::kBarrier:
      return;
    default:
      break;
  }
  const Shards shards(request_, group_.size());
  const std::size_t mine = shards.begin(me.index()) * size;
  const std::size_t mine_bytes = shards.length(me.index()) * size;
  switch (request_.kind) {
    case OpKind::kReduceScatter:
      return reduce(shards.begin(me.index()), shards.length(me.index()));
    case OpKind::kScatter:
      return copy_bytes(
          output,
          (me == root() ? static_cast<const std::byte*>(request_.input) : buffer_of(root())) + mine,
          mine_bytes);
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
        copy_bytes(
            output + shards.begin(each.index()) * size,
            (each == me ? static_cast<const std::byte*>(request_.input) : buffer_of(each)) + mine,
            mine_bytes);
      return;
    default:
      return;
  }
}

}  // namespace pycollective
