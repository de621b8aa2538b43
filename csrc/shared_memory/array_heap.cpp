#include "shared_memory/array_heap.h"

#include <algorithm>
#include <optional>

namespace pycollective {
namespace {

constexpr std::size_t kMost = std::size_t{1} << 62;  // far more than there can be; no sum wraps

}  // namespace

std::size_t ArrayHeap::take(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  if (const auto found = free_.take(bytes)) return *found;
  // The first page of a region stays unused, so that free ranges of two regions are never adjacent.
  const Segment::Region made = own_->add_region(bytes + kPage);
  free_.give_back(made.begin + kPage, made.end - made.begin - kPage);
  return free_.take(bytes).value();
}

void ArrayHeap::give_back(std::size_t offset, std::size_t bytes) {
  own_->free_array(offset, bytes);
  const std::lock_guard lock(mutex_);
  free_.give_back(offset, bytes);
}

std::shared_ptr<std::byte> ArrayHeap::allocate(std::size_t bytes,
                                               const std::function<void(std::size_t)>& check) {
  const std::size_t size = to_pages(std::clamp(bytes, kPage, kMost));
  const std::size_t offset = take(size);
  std::byte* const memory = own_->array_at(offset, size);
  const std::shared_ptr<std::byte> made(memory,
                                        [self = shared_from_this(), offset, size](std::byte*) {
                                          if (!self->guard_.forked()) self->give_back(offset, size);
                                        });
  for (std::size_t done = 0; done < size; done += kPiece) {
    const std::size_t piece = std::min(kPiece, size - done);
    check(piece);
    own_->commit_array(offset + done, piece);
  }
  return made;
}

}  // namespace pycollective
