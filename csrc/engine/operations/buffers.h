// How much a rank's buffers hold.
#pragma once

#include <numeric>

#include "engine/api.h"

namespace pycollective {

// Elements, of a rank that has the buffer.
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

// Elements; none where the rank has no such buffer.
inline std::size_t elements_of(const Buffer& buffer, const Request& request, int rank, int ranks) {
  return has(buffer, rank, request.root) ? elements_held(buffer.holds, request, rank, ranks) : 0;
}

}  // namespace pycollective
