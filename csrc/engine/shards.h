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
  // Operations whose buffer is one vector, cut into shards only for the work.
  static bool is_split(OpKind kind) {
    return kind == OpKind::kAllReduce || kind == OpKind::kReduce;
  }
  static std::size_t equal_count(const Request& request, int ranks) {
    if (!is_split(request.kind)) return request.count;
    // Whole cache lines, so that shards of an aligned buffer are aligned.
    const std::size_t line = kLine / size_of(request.dtype);
    const std::size_t n = static_cast<std::size_t>(ranks);
    return ((request.count + n - 1) / n + line - 1) / line * line;
  }

  std::array<Range, kMaxRanks> ranges_;
  std::size_t longest_ = 0;
};

}  // namespace pycollective
