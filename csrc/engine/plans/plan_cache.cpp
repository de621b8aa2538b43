#include "engine/plans/plan_cache.h"

#include <numeric>
#include <utility>

namespace pycollective {
namespace {

// Users who call with ever new sizes must not collect cases for ever.
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

std::size_t PlanCache::Hash::operator()(const Case& each) const {
  const std::size_t small = static_cast<std::size_t>(each.kind) |
                            static_cast<std::size_t>(each.dtype) << 4 |
                            static_cast<std::size_t>(each.root) << 8;
  // Sizes are mostly powers of two: without the product all would fall into a few buckets.
  return (each.bytes ^ small << 40) * 0x9e3779b97f4a7c15u >> 20;
}

void PlanCache::set_source(Source source) {
  // Declared before the lock, so that what is let go of goes after it.
  std::shared_ptr<const Source> other;
  decltype(made_) made;
  decltype(chosen_) chosen;
  if (source.make) other = std::make_shared<const Source>(std::move(source));
  const std::lock_guard lock(mutex_);
  chooses_ = other && other->choose;
  source_.swap(other);
  made_.swap(made);
  chosen_.swap(chosen);
}

std::shared_ptr<const Program> PlanCache::of(OpKind kind, std::string_view algorithm, int root) {
  std::shared_ptr<const Source> source;
  {
    const std::lock_guard lock(mutex_);
    if (const auto found = made_.find(std::tuple{kind, root, algorithm}); found != made_.end())
      return found->second;
    source = source_;
  }
  if (!source) return nullptr;  // closed, and about to be refused
  const std::string name(algorithm);
  std::shared_ptr<const Program> plan = source->make(kind, name, root);
  const std::lock_guard lock(mutex_);
  if (source_ != source) return plan;
  return made_.emplace(std::tuple{kind, root, name}, std::move(plan)).first->second;
}

std::shared_ptr<const Program> PlanCache::chosen(const Request& request) {
  const Case mine{request.kind, request.dtype, request.root, whole_bytes(request, ranks_)};
  std::shared_ptr<const Source> source;
  {
    const std::lock_guard lock(mutex_);
    const auto found = chosen_.find(mine);
    if (found != chosen_.end()) return found->second;
    source = source_;
  }
  if (!source || !source->choose) return nullptr;  // closed, and about to be refused
  const std::string name = source->choose(request, mine.bytes);
  std::shared_ptr<const Program> plan;
  // A barrier is an all-reduce of nothing.
  const OpKind kind = request.kind == OpKind::kBarrier ? OpKind::kAllReduce : request.kind;
  if (!name.empty()) plan = of(kind, name, request.root);
  const std::lock_guard lock(mutex_);
  if (source_ != source) return plan;
  if (chosen_.size() >= kMostCases) chosen_.clear();
  chosen_.emplace(mine, plan);
  return plan;
}

}  // namespace pycollective
