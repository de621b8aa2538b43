// Any algorithm: interprets an execution plan (plans/program.h), pipelined by slots. The executor
// does its steps on the memory at hand.
//
// Shards are cut into chunks of `part` elements. The plan runs once for each chunk, in slot (chunk
// mod slots_). Up to slots_ chunks (kChunkSlots at most) are under way at once: while one waits,
// the next goes on. Within a chunk a rank executes its instructions in order.
//
//   published[slot]   of the own mailbox: (chunk, events) of what peers may read there
//   combined          the number of chunks that this rank has finished, in order: it reads nothing
//                     of them any more, and peers may read what it wrote
//
// A slot is reused once all its readers have finished the chunk before. There is no deadlock: the
// oldest chunk needs nothing of a later one, and within a chunk the schedule is proved
// (pycollective/schedule/proof.py).
#pragma once

#include <algorithm>
#include <array>
#include <optional>
#include <vector>

#include "engine/group.h"
#include "engine/operation.h"
#include "engine/operations/arrival.h"
#include "engine/operations/internode_transfers.h"
#include "engine/plans/program.h"
#include "engine/shards.h"
#include "kernels/kernels.h"
#include "kernels/pack/pack.h"

namespace pycollective {

// Executes a plan's steps on the host's memory, at once.
//
// The interpreter (scheduled.h) decides what happens when, and computes addresses in the caller's
// buffers and in slots. The executor copies and combines what lies there, and publishes how far a
// rank is. (GPUs have an interpreter of their own: cuda/program.cu.)
// The functions are inline and not virtual: in a small ring's short steps, calls show.
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
    kernels_.reduce(leaves, what.terms, what.divisor, out, copy, count);
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

class Scheduled final : public Operation {
 public:
  // Whether the group's memory is large enough for the program: on all ranks or none.
  static bool fits(const Group& group, const Task& task);
  // Throws CollectiveFailure (kConfiguration) where it is not.
  static void require_fit(const Group& group, const Task& task);

  Scheduled(Group& group, const Task& task, std::uint64_t sequence);

  void start() override;
  State advance() override;
  bool finished_by(Member member) const override;
  void compare_calls() const override {
    arrival_.compare_arrived();
    if (internode_) internode_->compare_calls();
  }
  bool called_by(Member member) const override { return arrival_.arrived(member); }
  std::string internode_absentees() const override;
  std::set<int> internode_unfinished() const override;
  bool must_poll() const override { return internode_.has_value(); }

 private:
  // A chunk under way.
  struct Run {
    std::size_t chunk = 0;
    std::size_t next = 0;  // instruction
    std::uint64_t events = 0;
  };

  struct Slot {
    std::size_t bytes_of_an_element;  // of all places together
    std::size_t available;            // bytes of the data area for all slots
  };
  static Slot slot_of(const Group& group, const Task& task);

  void begin();
  bool slot_is_free(std::size_t chunk) const;
  bool go_on(Run& run);
  void copy(std::size_t chunk, const Ref& from, const Ref& to) const;
  void combine(std::size_t chunk, const Instruction& instruction);
  std::byte* at(const Ref& ref, std::size_t chunk) const;
  std::uint64_t mark(std::size_t chunk, std::uint64_t events) const;
  Range part_of(std::int32_t shard, std::size_t chunk) const;
  std::size_t begin_in(Place place, std::int32_t shard) const;
  // Messages to and from other hosts.
  std::size_t bytes_of(const Ref& ref, std::size_t chunk) const;
  std::size_t bytes_of(const Message& message, std::size_t chunk) const;
  const Ref& piece(const Message& message, std::int32_t number) const;
  void gather(const Message& message, std::size_t chunk, std::byte* to) const;
  void scatter(const Message& message, std::size_t chunk, const std::byte* from) const;
  // In a packed message each piece follows its packed length (docs/inside/wire.md).
  std::size_t capacity_of(const Message& message, std::size_t chunk) const;
  std::size_t pack(const Message& message, std::size_t chunk, std::byte* to) const;
  void unpack(const Message& message, std::size_t chunk, const std::byte* from) const;
  const Packing& packing_of(const Ref& ref) const {
    return program_.is_node(ref) ? packed_nodes_ : packed_items_;
  }
  void post(std::size_t chunk, std::int32_t number);
  bool receive(std::size_t chunk, std::int32_t number);
  void send(std::size_t chunk, std::int32_t number);

  ArrivalBarrier arrival_;
  std::optional<InternodeTransfers> internode_;  // where some ranks are on other hosts
  const Program& program_;
  std::byte* output_;
  Shards shards_;
  HostExecutor executor_;
  std::size_t element_;  // bytes
  std::size_t node_;     // bytes of a node's element
  std::size_t part_ = 0;
  std::size_t chunks_ = 0;
  std::size_t slots_ = kChunkSlots;  // chunks under way at once
  bool begun_ = false;
  std::uint64_t base_ = 0;               // chunks of earlier operations, on every rank
  std::size_t oldest_ = 0;               // chunk that is not done
  std::size_t started_ = 0;              // chunks
  std::array<Run, kChunkSlots> runs_{};  // by slot
  bool packs_ = false;                   // what goes to other hosts
  Packing packed_items_;
  Packing packed_nodes_;
  std::vector<Term> many_terms_;  // for more terms than a host has members
};

}  // namespace pycollective
