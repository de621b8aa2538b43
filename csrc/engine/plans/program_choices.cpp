#include "engine/plans/program_choices.h"

#include <numeric>
#include <utility>

namespace pycollective {
namespace {

// Programs that call with ever new sizes must not collect cases for ever.
constexpr std::size_t kMostCases = 512;

}  // namespace

std::size_t whole_bytes(const Request& request, int ranks) {
  std::size_t elements = request.count;
  if (!request.counts.empty()) {
    elements = std::accumulate(request.counts.begin(), request.counts.end(), std::size_t{0});
  } else if (in_shards(request.kind)) {
    elements *= static_cast<std::size_t>(ranks);
  }
  return elements * size_of(request.dtype);
}

std::size_t ProgramChoices::Hash::operator()(const Case& each) const {
  const std::size_t small = static_cast<std::size_t>(each.kind) |
                            static_cast<std::size_t>(each.dtype) << 4 |
                            static_cast<std::size_t>(each.root) << 8;
  // Sizes are mostly powers of two: without the product all would fall into a few buckets.
  return (each.bytes ^ small << 40) * 0x9e3779b97f4a7c15u >> 20;
}

void ProgramChoices::set_source(Source source) {
  // Declared before the lock, so that what is let go of goes after it.
  std::shared_ptr<const Source> other;
  decltype(known_) forgotten;
  if (source) other = std::make_shared<const Source>(std::move(source));
  const std::lock_guard lock(mutex_);
  has_source_ = other != nullptr;
  source_.swap(other);
  known_.swap(forgotten);
}

std::shared_ptr<const Program> ProgramChoices::find(const Request& request) {
  const Case mine{request.kind, request.dtype, request.root, whole_bytes(request, ranks_)};
  std::shared_ptr<const Source> source;
  {
    const std::lock_guard lock(mutex_);
    const auto found = known_.find(mine);
    if (found != known_.end()) return found->second;
    source = source_;
  }
  if (!source) return nullptr;  // closed, and about to be refused
  std::shared_ptr<const Program> program = (*source)(request, mine.bytes);
  const std::lock_guard lock(mutex_);
  if (!source_) return program;
  if (known_.size() >= kMostCases) known_.clear();
  known_.emplace(mine, program);
  return program;
}

}  // namespace pycollective
