#include "engine/host_executor.h"

#include <algorithm>

#include "engine/copy.h"
#include "engine/one_shot.h"

namespace pycollective {

HostExecutor::HostExecutor(Group& group, const Request& request) : group_(group) {
  if (reduces(request.kind))
    kernels_ = find_kernels(request.dtype, request.reduce_op, active_simd_level());
}

std::byte* HostExecutor::slots(Member member) const {
  return group_.data(member) + 2 * small_buffer_bytes(group_.data_bytes());
}

void HostExecutor::copy(void* to, const void* from, std::size_t bytes) {
  copy_bytes(to, from, bytes);
}

void HostExecutor::combine(const Combining& each) {
  const FloatEnvironment ieee;
  if (!each.only_leaves)
    return kernels_.combine(each.what, each.terms, each.out, each.copy, each.count);
  // In registers, and the only way for a single rank.
  const void* few_leaves[kMaxMembers];
  const void** leaves = few_leaves;
  if (each.what.terms > kMaxMembers) {
    const auto needed = static_cast<std::size_t>(each.what.terms);
    many_leaves_.resize(std::max(many_leaves_.size(), needed));
    leaves = many_leaves_.data();
  }
  for (int t = 0; t < each.what.terms; ++t) leaves[t] = each.terms[t].data;
  kernels_.reduce(leaves, each.what.terms, each.out, each.copy, each.count);
}

void HostExecutor::publish(std::size_t slot, std::uint64_t mark) {
  group_.publish(group_.own().published[slot].mark, mark);
}

bool HostExecutor::has_published(Member member, std::size_t slot, std::uint64_t mark) {
  return group_.mailbox(member).published[slot].mark.load(std::memory_order_acquire) >= mark;
}

std::uint64_t HostExecutor::chunks_done() const {
  return group_.own().progress.combined.load(std::memory_order_relaxed);
}

void HostExecutor::publish_done(std::uint64_t chunks) {
  group_.publish(group_.own().progress.combined, chunks);
}

bool HostExecutor::has_done(Member member, std::uint64_t chunks) const {
  return group_.mailbox(member).progress.combined.load(std::memory_order_acquire) >= chunks;
}

}  // namespace pycollective
