// Executes a plan's steps on the host's memory, at once.
//
// The interpreter (scheduled.h) decides what happens when, and computes addresses in the caller's
// buffers and in slots. The executor copies and combines what lies there, and publishes how far a
// rank is. (GPUs have an interpreter of their own: cuda/program.h.)
// The functions are inline and not virtual: in a small ring's short steps, calls show.
#pragma once

#include <algorithm>
#include <vector>

#include "engine/group.h"
#include "engine/operations/shards.h"
#include "kernels/kernels.h"

namespace pycollective {

class HostExecutor {
 public:
  HostExecutor(Group& group, const Request& request) : group_(group) {
    if (reduces(request.kind))
      kernels_ = find_kernels(request.dtype, request.reduce_op, active_simd_level());
  }

  // Where a member's slots begin, for this rank.
  std::byte* slots(Member member) const { return group_.slots(member); }

  // `from` may be `to`; otherwise they do not overlap.
  void copy(void* to, const void* from, std::size_t bytes) const { copy_bytes(to, from, bytes); }

  // Combines `count` elements of each term, as CombineFn (kernels/kernels.h) does. `only_leaves`:
  // the terms are the leaves of all ranks, in rank order, and `out` is the result.
  void combine(const Combination& what, const Term* terms, bool only_leaves, void* out, void* copy,
               std::size_t count) {
    const FloatEnvironment ieee;
    if (!only_leaves) return kernels_.combine(what, terms, out, copy, count);
    // In registers, and the only way for a single rank.
    const void* few_leaves[kMaxMembers];
    const void** leaves = few_leaves;
    if (what.terms > kMaxMembers) {
      const auto needed = static_cast<std::size_t>(what.terms);
      many_leaves_.resize(std::max(many_leaves_.size(), needed));
      leaves = many_leaves_.data();
    }
    for (int t = 0; t < what.terms; ++t) leaves[t] = terms[t].data;
    kernels_.reduce(leaves, what.terms, out, copy, count);
  }

  // Members that see `mark` in the slot may read what was written before.
  void publish(std::size_t slot, std::uint64_t mark) {
    group_.publish(group_.own().published[slot].mark, mark);
  }
  // Whether a member has published as much, so that later steps may read it.
  bool has_published(Member member, std::size_t slot, std::uint64_t mark) const {
    return group_.mailbox(member).published[slot].mark.load(std::memory_order_acquire) >= mark;
  }

  // The number of chunks that this rank has finished since the group began: it reads nothing of
  // them any more, and peers may read what it wrote.
  std::uint64_t chunks_done() const {
    return group_.own().progress.combined.load(std::memory_order_relaxed);
  }
  void publish_done(std::uint64_t chunks) {
    group_.publish(group_.own().progress.combined, chunks);
  }
  // Whether a member has finished as many, so that later steps may write where it read.
  bool has_done(Member member, std::uint64_t chunks) const {
    return group_.mailbox(member).progress.combined.load(std::memory_order_acquire) >= chunks;
  }

 private:
  Group& group_;
  Kernels kernels_;
  std::vector<const void*> many_leaves_;  // for more leaves than a host has members
};

}  // namespace pycollective
