// Hands out page-aligned ranges of a segment, first fit. Not thread-safe.
#pragma once

#include <cstddef>
#include <map>
#include <optional>

namespace pycollective {

class Arena {
 public:
  Arena(std::size_t begin, std::size_t end) { free_[begin] = end - begin; }

  // `bytes` is a multiple of the page size. Nothing where no range is large enough.
  std::optional<std::size_t> take(std::size_t bytes);
  void give_back(std::size_t offset, std::size_t bytes);

 private:
  std::map<std::size_t, std::size_t> free_;  // offset -> bytes, never adjacent
};

}  // namespace pycollective
