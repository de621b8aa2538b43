// Small messages: each rank shares all of its input as it arrives, then each takes what it needs.
//
//   start     copy the own input into the own small buffer; arrive
//   advance   once all have arrived and agree: reduce, or copy, straight into the output
//
// One synchronisation. An all-reduce of m bytes costs each rank m written and n m read.
// Each rank has two small buffers, used in turn. A rank writes for operation s + 2 only after all
// have arrived at s + 1, so they have read what was written for s.
// Whose buffer a rank writes changes every two operations: its own, then the next rank's. So two
// ranks write where they have read what the other wrote, which is cheap (two_shot.h).
#pragma once

#include "engine/operation.h"
#include "engine/operations/arrival.h"
#include "engine/shards.h"

namespace pycollective {

class OneShot final : public Operation {
 public:
  // Whether this path serves the request. Depends only on what all ranks agree on.
  static bool fits(const Group& group, const Request& request);

  OneShot(Group& group, const Task& task, std::uint64_t sequence)
      : Operation(group, task, sequence), arrival_(group, task, sequence) {}

  // Copies the own input into the own small buffer: all that others want of it, without gaps.
  static void share(Group& group, const Request& request, std::uint64_t sequence);
  // Where `member` writes, in the operation of that number.
  static std::byte* buffer_of(const Group& group, Member member, std::uint64_t sequence) {
    const int turn = static_cast<int>(sequence >> 1 & 1);
    const Member owner((member.index() + turn) % group.size());
    return group.data(owner) + (sequence & 1) * small_buffer_bytes(group.data_bytes());
  }

  void start() override;
  State advance() override;
  bool is_short() const override { return true; }
  bool finished_by(Member member) const override { return arrival_.arrived(member); }
  void compare_calls() const override { arrival_.compare_arrived(); }
  bool called_by(Member member) const override { return arrival_.arrived(member); }

 private:
  std::byte* buffer_of(Member member) const { return buffer_of(group_, member, sequence_); }
  // The direct paths run on one host, where rank r is member r.
  Member root() const { return Member(request_.root); }
  // This rank's shard, as another gives it.
  const std::byte* shard_for_me(Member from, const Shards& shards) const;
  void finish();
  void reduce(const void* const* leaves, std::size_t count);

  ArrivalBarrier arrival_;
};

}  // namespace pycollective
