// Large reductions of shared arrays (Communicator::allocate): nothing goes through slots.
//
//   start     say where the own input lies; arrive
//   advance   once all have arrived and agree, for each chunk c of a shard:
//     combine   the own part: reduce all ranks' inputs, where they lie, into the output; publish
//     fetch     of an all-reduce: each peer's part from its output, once it has published that
//   and in the end publish that this rank has read all, wait until all have, look for failures
//
// An all-reduce is in place. A rank overwrites its leaves of a peer's shard with results alone,
// each when the peer has published it, and so has read those leaves; and nobody else reads them.
// Its own shard it writes once. So what others read stays until all have read all.
//
// An all-reduce of m bytes on n ranks: each rank reads m and writes m / n for its own shard, and
// reads and writes (n-1)/n m of results.
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
  // Whether this path may serve the request, if it is not small. Of an all-reduce that fits in the
  // caches, each line would go between the cores more often than through slots.
  static bool fits(const Group& group, const Request& request) {
    if (group.size() == 1) return false;
    return request.kind == OpKind::kReduceScatter ||
           (request.kind == OpKind::kAllReduce &&
            request.count * size_of(request.dtype) >= kLeastAllReduce);
  }

  SharedReduce(Group& group, const Task& task, std::uint64_t sequence);

  void start() override { arrival_.arrive(input_word()); }
  State advance() override;
  bool finished_by(Member member) const override;
  void compare_calls() const override { arrival_.compare_arrived(); }
  bool called_by(Member member) const override { return arrival_.arrived(member); }

 private:
  static constexpr std::size_t kLeastAllReduce = std::size_t{8} << 20;  // bytes
  enum class Stage { kArrival, kWork, kWait };

  std::uint64_t input_word() const;
  bool begin();  // false: not in place
  std::size_t input_bytes() const {
    return element_ * elements_of(traits_of(request_.kind).input, request_, group_.me().index(),
                                  group_.size());
  }
  // The next chunk, if there is one and it can be done.
  bool combine();
  bool fetch();
  bool all_have_read() const;
  bool has_read(Member member) const {
    return group_.mailbox(member).progress.copied_in.load(std::memory_order_acquire) >=
           base_ + chunks_;
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
  std::size_t combined_ = 0;  // chunks
  std::size_t fetched_ = 0;   // chunks, of all peers
  int peer_ = 1;              // how far around the ring the next one has come
  std::optional<TwoShot> two_shot_;
};

}  // namespace pycollective
