// Large reduce-scatters of shared arrays (Communicator::allocate): nothing goes through slots.
//
//   start     say where the own input lies; arrive
//   advance   once all have arrived and agree:
//     reduce    the own shard of all ranks' inputs, where they lie, into the output, in chunks
//     publish   that this rank has read all
//     wait      until all have; look for failures
//
// Nobody reads what a rank writes, so what others read stays until all have read all.
//
// A reduce-scatter to shards of m bytes on n ranks: each rank reads n m and writes m.
//
// If some rank's input lies elsewhere, all see that in the arrival lines, and all go on as TwoShot.
#pragma once

#include <array>
#include <optional>

#include "engine/operations/arrival.h"
#include "engine/operations/operation.h"
#include "engine/operations/shards.h"
#include "engine/operations/two_shot.h"
#include "kernels/kernels.h"

namespace pycollective {

class SharedReduce final : public Operation {
 public:
  // Whether this path may serve the request, if it is not small.
  static bool fits(const Group& group, const Request& request) {
    return group.size() > 1 && request.kind == OpKind::kReduceScatter;
  }

  SharedReduce(Group& group, const Task& task, std::uint64_t sequence);

  void start() override;
  State advance() override;
  bool finished_by(Member member) const override;
  void compare_calls() const override { arrival_.compare_arrived(); }
  bool called_by(Member member) const override { return arrival_.arrived(member); }

 private:
  enum class Stage { kArrival, kReduce, kWait };

  bool begin();  // false: some input lies elsewhere
  std::size_t input_bytes() const {
    return element_ * elements_of(traits_of(request_.kind).input, request_, group_.me().index(),
                                  group_.size());
  }
  void reduce_chunk();
  bool has_read(Member member) const {
    return group_.mailbox(member).progress.combined.load(std::memory_order_acquire) > base_;
  }

  ArrivalBarrier arrival_;
  Shards shards_;
  ReduceFn reduce_;
  std::size_t element_;  // bytes
  std::size_t part_;     // elements of a shard in a chunk
  std::size_t chunks_;
  std::uint64_t base_;  // chunks of earlier operations, on every rank
  Stage stage_ = Stage::kArrival;
  std::array<const std::byte*, kMaxMembers> inputs_;
  std::size_t reduced_ = 0;  // chunks
  std::optional<TwoShot> two_shot_;
};

}  // namespace pycollective
