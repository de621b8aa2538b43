// The caller's buffers: how much each holds, which elements belong to which rank, and which part of
// them is handled in a chunk.
//
// Equal shards are computed, so nothing here grows with the ranks. The begins of uneven shards are
// kept, without allocation for as many ranks as a host has.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <numeric>
#include <vector>

#include "engine/api.h"
#include "engine/plans/program.h"
#include "kernels/copy.h"
#include "shared_memory/layout.h"

namespace pycollective {

// A copy into an output of which each rank's shard has so many bytes: past the caches where they
// would not hold it, which leaves more of the memory's bandwidth.
inline void copy_out(void* to, const void* from, std::size_t bytes, std::size_t shard) {
  constexpr std::size_t kLeastStreamed = std::size_t{8} << 20;
  if (shard < kLeastStreamed || to == from) return copy_bytes(to, from, bytes);
  copy_streaming(to, from, bytes);
  finish_stores();
}

// The elements of a rank that has the buffer.
inline std::size_t elements_held(Holds holds, const Request& request, int rank, int ranks) {
  switch (holds) {
    case Holds::kNothing:
      break;
    case Holds::kVector:
      return request.count;
    case Holds::kShard:
      return request.counts.empty() ? request.count
                                    : request.counts[static_cast<std::size_t>(rank)];
    case Holds::kAllShards:
      return request.counts.empty()
                 ? request.count * static_cast<std::size_t>(ranks)
                 : std::accumulate(request.counts.begin(), request.counts.end(), std::size_t{0});
  }
  return 0;
}

// The elements of a rank's buffer; 0 where it has none.
inline std::size_t elements_of(const Buffer& buffer, const Request& request, int rank, int ranks) {
  return has(buffer, rank, request.root) ? elements_held(buffer.holds, request, rank, ranks) : 0;
}

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
  std::size_t whole() const { return total_; }  // of all shards

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
    total_ = *begins;
  }
  const std::size_t* begins() const { return many_.empty() ? few_.data() : many_.data(); }

  // Whole cache lines, so that shards of an aligned buffer are aligned.
  static std::size_t equal_cut(std::size_t count, int shards, Dtype dtype) {
    const std::size_t line = kLine / size_of(dtype);
    const std::size_t n = static_cast<std::size_t>(shards);
    return ((count + n - 1) / n + line - 1) / line * line;
  }

  std::size_t longest_ = 0;  // the length of each equal shard but the last ones
  std::size_t total_ = 0;
  int owner_ = -1;  // the one that owns everything, if any
  bool uneven_ = false;
  // Of uneven shards: where each begins, and the end.
  std::array<std::size_t, kMaxMembers + 1> few_;
  std::vector<std::size_t> many_;
};

// Where the shards of a program lie.

// A broadcast's root has its output already: where its input is.
inline void* output_of(const Request& request, int rank) {
  const bool is_there = traits_of(request.kind).output.who == Who::kAllButRoot;
  return is_there && rank == request.root ? const_cast<void*>(request.input) : request.output;
}

inline Shards shards_of(const Request& request, const Program& program) {
  if (program.pieces == Pieces::kCut)
    return Shards::cut(request.count, program.shards, request.dtype);
  return Shards(request, program.ranks);  // pairs are of equal size, one shard's
}

constexpr int kBeginsAtZero = -1;

// The shard of Shards where a program's shard begins in the caller's input or output.
inline int begin_of(const Program& program, Place place, std::int32_t shard) {
  const OperationTraits& traits = traits_of(program.kind);
  const bool input = place == Place::kInput;
  if ((input ? traits.input : traits.output).holds == Holds::kShard) return kBeginsAtZero;
  if (traits.pieces != Pieces::kPairs) return shard;
  return input ? shard % program.ranks : shard / program.ranks;
}

}  // namespace pycollective
