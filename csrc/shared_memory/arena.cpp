#include "shared_memory/arena.h"

#include <iterator>

namespace pycollective {

std::optional<std::size_t> Arena::take(std::size_t bytes) {
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    const auto [offset, available] = *it;
    if (available < bytes) continue;
    free_.erase(it);
    if (available > bytes) free_[offset + bytes] = available - bytes;
    return offset;
  }
  return std::nullopt;
}

void Arena::give_back(std::size_t offset, std::size_t bytes) {
  auto next = free_.lower_bound(offset);
  if (next != free_.end() && offset + bytes == next->first) {
    bytes += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    auto previous = std::prev(next);
    if (previous->first + previous->second == offset) {
      previous->second += bytes;
      return;
    }
  }
  free_[offset] = bytes;
}

}  // namespace pycollective
