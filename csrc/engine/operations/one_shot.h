// Small messages: each rank shares all of its input as it arrives, then each takes what it needs.
//
//   start     copy the own input into the own small buffer; arrive
//   advance   once all have arrived and agree: reduce, or copy, straight into the output
//
// One synchronisation. An all-reduce of m bytes costs each rank m written and n m read.
// The two small buffers are used in turn. A rank writes for operation s + 2 only after all have
// arrived at s + 1, so they have read what it wrote for s.
#pragma once

#include "engine/operations/arrival.h"
#include "engine/operations/operation.h"

namespace pycollective {

class OneShot final : public Operation {
 public:
  // Whether this path serves the request. Depends only on what all ranks agree on.
  static bool fits(const Group& group, const Request& request);

  OneShot(Group& group, const Task& task, std::uint64_t sequence)
      : Operation(group, task, sequence), arrival_(group, task, sequence) {}

  void start() override;
  State advance() override;
  bool is_short() const override { return true; }
  bool finished_by(Member member) const override { return arrival_.arrived(member); }
  void compare_calls() const override { arrival_.compare_arrived(); }
  bool called_by(Member member) const override { return arrival_.arrived(member); }

 private:
  const std::byte* buffer_of(Member member) const {
    return group_.data(member) + (sequence_ & 1) * small_buffer_bytes(group_.data_bytes());
  }
  // The direct paths run on one host, where rank r is member r.
  Member root() const { return Member(request_.root); }
  void finish();
  void reduce(std::size_t begin, std::size_t count);

  ArrivalBarrier arrival_;
};

}  // namespace pycollective
