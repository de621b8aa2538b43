// Large messages: leaves go to each shard's owner, results to all, pipelined in cache-sized chunks.
//
// The buffer is cut into one shard a rank, each shard into chunks of `part` elements. For each
// chunk c, on each rank:
//   A(c)  copy in   the own leaves of every peer's part, into slot c mod 3 of the own data area
//   B(c)  combine   the own part: reduce all ranks' leaves in the order, into the output and into
//                   result slot c mod 3
//   C(c)  fetch     every peer's part of the result into the output
// in the order C(i-2), A(i+1), B(i) for i = 0, 1, ... Before C(i-2) a rank waits until all peers
// have combined i-2; before B(i) until all have copied in i: both happened a whole round ago where
// ranks keep pace. These two waits also free the slots:
//   A(i+1) overwrites the slot of A(i-2), which all have combined;
//   B(i) overwrites the result of B(i-3), which a peer fetched before its A(i), awaited above.
// Each operation is a choice of what A, B and C do; the waits are the same for all.
//
// An all-reduce of m bytes on n ranks: each rank reads m and writes m of its own memory, and writes
// m and reads m through slots that stay in cache: (n-1)/n m of leaves and m/n of results written.
#pragma once

#include "engine/operations/arrival.h"
#include "engine/operations/operation.h"
#include "engine/operations/shards.h"
#include "kernels/kernels.h"

namespace pycollective {

class TwoShot final : public Operation {
 public:
  TwoShot(Group& group, const Task& task, std::uint64_t sequence);

  void start() override { arrival_.arrive(); }
  State advance() override;
  bool finished_by(Member member) const override;
  void compare_calls() const override { arrival_.compare_arrived(); }
  bool called_by(Member member) const override { return arrival_.arrived(member); }

 private:
  enum class Stage { kArrival, kFetch, kCopyIn, kCombine };

  void begin();
  bool fetch(std::size_t chunk);
  void copy_in(std::size_t chunk);
  bool combine(std::size_t chunk);
  void reduce_part(std::size_t chunk);
  void exchange_part(std::size_t chunk);
  void share_part(std::size_t chunk);

  // The direct paths run on one host, where rank r is member r.
  Member root() const { return Member(request_.root); }
  // The member `steps` after this one around the ring.
  Member after_me(int steps) const { return Member((group_.me().index() + steps) % group_.size()); }
  Range part_of(Member owner, std::size_t chunk) const {
    return shards_.part(owner.index(), chunk, part_);
  }
  std::byte* leaf_slot(Member member, std::size_t chunk, Member owner) const;
  std::byte* result_slot(Member member, std::size_t chunk) const;
  bool copies_in(Member member) const;  // whether it gives leaves or parts to their owners
  bool fetches() const;                 // whether this rank fetches the results of others

  ArrivalBarrier arrival_;
  Shards shards_;
  ReduceFn reduce_ = nullptr;
  std::size_t element_;   // bytes
  std::size_t part_ = 0;  // elements of a shard in a chunk
  std::size_t chunks_ = 0;
  std::uint64_t base_ = 0;  // chunks of earlier operations, on every rank
  std::size_t round_ = 0;   // i above
  Stage stage_ = Stage::kArrival;
  int peer_ = 1;  // how far around the ring the current stage has come
};

}  // namespace pycollective
