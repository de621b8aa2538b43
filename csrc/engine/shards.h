// Which elements of a buffer belong to which rank, and which part of them is handled in a chunk.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>

#include "engine/api.h"
#include "transport/layout.h"

namespace pycollective {

struct Range {
  std::size_t begin;
  std::size_t length;
};

class Shards {
 public:
  // One vector of `count` elements in `shards` pieces.
  static Shards cut(std::size_t count, int shards, Dtype dtype) {
    Shards result;
    const std::size_t equal = equal_cut(count, shards, dtype);
    std::size_t begin = 0;
    for (int s = 0; s < shards; ++s) {
      const std::size_t length = std::min(equal, count - begin);
      result.ranges_[s] = {begin, length};
      begin += length;
    }
    result.longest_ = std::min(equal, count);
    return result;
  }

  // One shard a rank, as the request's operation has them.
  Shards(const Request& request, int ranks) {
    std::size_t begin = 0;
    const std::size_t equal = equal_count(request, ranks);
    for (int r = 0; r < ranks; ++r) {
      std::size_t length = equal;
      if (!request.counts.empty())
        length = request.counts[r];
      else if (request.kind == OpKind::kBroadcast)
        length = r == request.root ? request.count : 0;  // the root owns everything
      else if (is_split(request.kind))
        length = std::min(equal, request.count - begin);
      ranges_[r] = {begin, length};
      begin += length;
      longest_ = std::max(longest_, length);
    }
  }

  std::size_t begin(int rank) const { return ranges_[rank].begin; }
  std::size_t length(int rank) const { return ranges_[rank].length; }
  std::size_t longest() const { return longest_; }

  // Chunk `chunk` of a shard, `part` elements each: where in the whole buffer, and how long.
  Range part(int rank, std::size_t chunk, std::size_t part) const {
    const Range& shard = ranges_[rank];
    const std::size_t skip = std::min(chunk * part, shard.length);
    return {shard.begin + skip, std::min(part, shard.length - skip)};
  }

 private:
  Shards() = default;

  // Operations whose buffer is one vector, cut into shards only for the work.
  static bool is_split(OpKind kind) {
    return kind == OpKind::kAllReduce || kind == OpKind::kReduce;
  }
  static std::size_t equal_count(const Request& request, int ranks) {
    return is_split(request.kind) ? equal_cut(request.count, ranks, request.dtype) : request.count;
  }
  // Whole cache lines, so that shards of an aligned buffer are aligned.
  static std::size_t equal_cut(std::size_t count, int shards, Dtype dtype) {
    const std::size_t line = kLine / size_of(dtype);
    const std::size_t n = static_cast<std::size_t>(shards);
    return ((count + n - 1) / n + line - 1) / line * line;
  }

  std::array<Range, kMaxRanks> ranges_;
  std::size_t longest_ = 0;
};

}  // namespace pycollective
