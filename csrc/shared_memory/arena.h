// Hands out page-aligned ranges, first fit. Not thread-safe.
#pragma once

#include <cstddef>
#include <map>
#include <optional>

#include "shared_memory/layout.h"

namespace pycollective {

constexpr std::size_t to_pages(std::size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

class Arena {
 public:
  // `bytes` is a multiple of the page size. Nothing where no range is large enough.
  std::optional<std::size_t> take(std::size_t bytes);
  // Also for what was never taken: more to hand out.
  void give_back(std::size_t offset, std::size_t bytes);

 private:
  std::map<std::size_t, std::size_t> free_;  // offset -> bytes, never adjacent
};

}  // namespace pycollective
