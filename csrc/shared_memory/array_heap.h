// Memory for users' arrays in the own segment, which peers read in place.
//
// It may outlive its node: an array is its owner's as long as any reference to it lives.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

#include "per_process.h"
#include "shared_memory/arena.h"
#include "shared_memory/segment.h"

namespace pycollective {

class ArrayHeap : public std::enable_shared_from_this<ArrayHeap> {
 public:
  // Between two looks at what memory is left.
  static constexpr std::size_t kPiece = std::size_t{32} << 20;

  explicit ArrayHeap(std::shared_ptr<Segment> own) : own_(std::move(own)) {}

  // `bytes` (at least one page) of undefined contents, aligned to a page, freed with the last share
  // of the pointer. Linux commits them piece by piece; `check(bytes of a piece)` comes before each
  // and may throw, as Linux would kill a process that touched memory it does not have. Thread-safe.
  // Throws std::system_error.
  std::shared_ptr<std::byte> allocate(std::size_t bytes,
                                      const std::function<void(std::size_t)>& check);

 private:
  std::size_t take(std::size_t bytes);
  void give_back(std::size_t offset, std::size_t bytes);

  const std::shared_ptr<Segment> own_;
  ForkGuard guard_;
  std::mutex mutex_;  // not held while `check` runs
  Arena free_;
};

}  // namespace pycollective
