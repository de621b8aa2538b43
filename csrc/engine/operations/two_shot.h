// Large messages: leaves go to each shard's owner, results to all, pipelined in cache-sized chunks.
//
// The buffer is cut into one shard a rank, each shard into chunks of `part` elements. For each
// chunk c, on each rank:
//   A(c)  copy in   the own leaves of every peer's part, each into slot c mod 4 of the pair
//   B(c)  combine   the own part: reduce all ranks' leaves in the order, into the output and, as an
//                   answer, into the slots where the peers' leaves lay
//   C(c)  fetch     every peer's part of the result, out of the slots of the own leaves
// in the order C(i-2), A(i+1), B(i) for i = 0, 1, ... Before C(i-2) a rank waits until all peers
// have combined i-2; before B(i) until all have copied in i: both happened a whole round ago where
// ranks keep pace.
// Each operation is a choice of what A, B and C do; the waits are the same for all. What is only
// shared (all_gather, ...) goes, instead of an answer, into slot c mod 4 that all peers read.
//
// Where slots lie. The line that a core reads comes with the right to write it, if the core that
// wrote it last was another one (it migrates). To write any other line that a peer has read takes a
// way to its cache and back. So whoever has read a slot writes there next:
//   with answers   the owner writes over the leaf, its giver over the answer;
//   without        the two of a pair exchange their slots each lap, every four chunks, and the
//                  slots that all read go on to the next rank or come back.
// When is a slot free? The answer to c is fetched before the leaf of c+4 is copied in, by the same
// rank. Without answers, the one who copies in c+4 has read c there itself, in B(c), or, in a slot
// that all read, writes after the wait for all to have copied in c+4, which each did after C(c).
// The laps go on from one operation to the next. Where its parts have another size all slots are
// free anyway, since an operation begins when all have finished the one before.
//
// An all-reduce of m bytes on n ranks: each rank reads m and writes m of its own memory, and writes
// and reads through slots (n-1)/n m of leaves and as much of results.
#pragma once

#include "engine/operation.h"
#include "engine/operations/arrival.h"
#include "engine/shards.h"
#include "kernels/kernels.h"
#include "kernels/prefetching.h"

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
  // A part of the input, to prefetch while something else is copied.
  NextRead next_input(Member owner, std::size_t chunk) const;
  void copy_in(std::size_t chunk);
  bool combine(std::size_t chunk);
  void reduce_part(std::size_t chunk);
  void reduce_for_all(const void* const* leaves, std::size_t chunk, std::byte* output,
                      std::size_t count);
  void exchange_part(std::size_t chunk);
  void share_part(std::size_t chunk);

  // The direct paths run on one host, where rank r is member r.
  Member root() const { return Member(request_.root); }
  Range part_of(Member owner, std::size_t chunk) const {
    return shards_.part(owner.index(), chunk, part_);
  }
  static constexpr std::size_t kSlots = 4;
  std::size_t slot_of(std::size_t chunk) const { return (base_ + chunk) % kSlots; }
  bool is_odd_lap(std::size_t chunk) const { return ((base_ + chunk) / kSlots & 1) != 0; }
  std::byte* leaf_slot(Member member, std::size_t chunk, Member owner) const;
  std::byte* shared_slot(Member member, std::size_t chunk) const;
  bool copies_in(Member member) const;  // whether it gives leaves or parts to their owners
  bool fetches() const;                 // whether this rank fetches the results of others
  // Copies a part into a slot.
  void write(std::byte* slot, const std::byte* from, std::size_t bytes, NextRead next = {});
  State end();  // learns what the call has cost

  ArrivalBarrier arrival_;
  Shards shards_;
  ReduceFn reduce_ = nullptr;
  std::size_t element_;   // bytes
  std::size_t part_ = 0;  // elements of a shard in a chunk
  std::size_t chunks_ = 0;
  bool prefetches_ = false;
  Chooser& stores_;
  bool streams_;
  bool has_written_ = false;
  CallTimer timer_;
  std::uint64_t base_ = 0;  // chunks of earlier operations, on every rank
  std::size_t round_ = 0;   // i above
  Stage stage_ = Stage::kArrival;
  int peer_ = 1;  // how far around the ring the current stage has come
};

}  // namespace pycollective
