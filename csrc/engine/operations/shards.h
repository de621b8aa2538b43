// Which elements of a buffer belong to which rank, and which part of them is handled in a chunk.
//
// Equal shards are a matter of arithmetic, so nothing here grows with the ranks; where each uneven
// one begins is kept, without allocation for as many ranks as a host has.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <vector>

#include "engine/api.h"
#include "shared_memory/layout.h"

namespace pycollective {

struct Range {
  std::size_t begin;
  std::size_t length;
};

class Shards {
 public:
  // One vector of `count` elements in `shards` pieces.
  static Shards cut(std::size_t count, int shards, Dtype dtype) {
    return Shards(equal_cut(count, shards, dtype), count);
  }

  // One shard a rank, as the request's operation has them.
  Shards(const Request& request, int ranks) {
    if (!request.counts.empty()) {
      keep(request.counts);
    } else if (!in_shards(request.kind) &&
               !reduces(request.kind)) {  // a broadcast: the root owns everything
      owner_ = request.root;
      total_ = longest_ = request.count;
    } else if (!in_shards(request.kind)) {  // one vector, cut only for the work
      share(equal_cut(request.count, ranks, request.dtype), request.count);
    } else {
      share(request.count, request.count * static_cast<std::size_t>(ranks));
    }
  }

  std::size_t begin(int shard) const {
    const auto number = static_cast<std::size_t>(shard);
    if (uneven_) return begins()[number];
    if (owner_ >= 0) return shard > owner_ ? total_ : 0;
    return std::min(number * longest_, total_);
  }
  std::size_t length(int shard) const {
    const auto number = static_cast<std::size_t>(shard);
    if (uneven_) return begins()[number + 1] - begins()[number];
    if (owner_ >= 0) return shard == owner_ ? total_ : 0;
    return std::min(longest_, total_ - begin(shard));
  }
  std::size_t longest() const { return longest_; }

  // Chunk `chunk` of a shard, `part` elements each: where in the whole buffer, and how long.
  Range part(int shard, std::size_t chunk, std::size_t part) const {
    const std::size_t whole = length(shard);
    const std::size_t skip = std::min(chunk * part, whole);
    return {begin(shard) + skip, std::min(part, whole - skip)};
  }

 private:
  Shards(std::size_t equal, std::size_t total) { share(equal, total); }

  void share(std::size_t equal, std::size_t total) {
    longest_ = std::min(equal, total);
    total_ = total;
  }
  void keep(const std::vector<std::size_t>& counts) {
    uneven_ = true;
    if (counts.size() > kMaxMembers) many_.resize(counts.size() + 1);
    std::size_t* begins = counts.size() > kMaxMembers ? many_.data() : few_.data();
    *begins = 0;
    for (const std::size_t count : counts) {
      begins[1] = *begins + count;
      ++begins;
      longest_ = std::max(longest_, count);
    }
  }
  const std::size_t* begins() const { return many_.empty() ? few_.data() : many_.data(); }

  // Whole cache lines, so that shards of an aligned buffer are aligned.
  static std::size_t equal_cut(std::size_t count, int shards, Dtype dtype) {
    const std::size_t line = kLine / size_of(dtype);
    const std::size_t n = static_cast<std::size_t>(shards);
    return ((count + n - 1) / n + line - 1) / line * line;
  }

  std::size_t longest_ = 0;  // of equal shards each, but for the last ones
  std::size_t total_ = 0;
  int owner_ = -1;  // of everything, where one is
  bool uneven_ = false;
  // Of uneven shards: where each begins, and the end.
  std::array<std::size_t, kMaxMembers + 1> few_;
  std::vector<std::size_t> many_;
};

}  // namespace pycollective
