// What a program's steps are on the host's memory: done when they are handed over.
//
// This is the seam between the interpreter of programs (scheduled.h) and the memory that they move.
// The interpreter decides what happens when. It computes with addresses, of the caller's buffers
// and of slots, and leaves all that lies there to its executor: copies, combinations, and the words
// by which ranks of a host tell each other how far they are. These functions are all that another
// kind of memory has to offer to the same interpreter (GPUs have a second one: cuda/program.h).
// They are inline, and not virtual, because a small ring's steps are so short that calls show.
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

  // `count` elements of each term, as CombineFn (kernels/kernels.h) has it. `only_leaves`: the
  // terms are all ranks' leaves, in their order, and `out` is the result.
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

  // What was handed over is the members' to read once they see `mark` in the slot.
  void publish(std::size_t slot, std::uint64_t mark) {
    group_.publish(group_.own().published[slot].mark, mark);
  }
  // Whether a member has published as much, so that what is handed over from now on may read it.
  bool has_published(Member member, std::size_t slot, std::uint64_t mark) const {
    return group_.mailbox(member).published[slot].mark.load(std::memory_order_acquire) >= mark;
  }

  // Chunks that this rank has done with since the group began: it reads nothing of them any more,
  // and what it wrote of them is its peers' to read.
  std::uint64_t chunks_done() const {
    return group_.own().progress.combined.load(std::memory_order_relaxed);
  }
  void publish_done(std::uint64_t chunks) {
    group_.publish(group_.own().progress.combined, chunks);
  }
  // Whether a member has done with as many, so that what is handed over from now on may write where
  // it read.
  bool has_done(Member member, std::uint64_t chunks) const {
    return group_.mailbox(member).progress.combined.load(std::memory_order_acquire) >= chunks;
  }

 private:
  Group& group_;
  Kernels kernels_;
  std::vector<const void*> many_leaves_;  // room for more than a host has members
};

}  // namespace pycollective
