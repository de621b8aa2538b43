// Messages that only move: each rank copies what it needs straight from its peers' inputs. And
// large reduce-scatters of shared arrays: each reduces its own shard from where all inputs lie.
//
//   start     say where the own input lies: in a shared array, in this process, or, if it is small,
//             in the small buffer, where this rank has copied it (OneShot); arrive
//   advance   once all have arrived and agree:
//     copy      what this rank needs of each peer's input into its output, in pieces: by loads
//               where this rank maps it (shared arrays, small buffers), else by a system call
//     publish   that this rank has read, or could not; the end, if all inputs were in small buffers
//     wait      until all have read; look for failures
//
// An all-gather of m bytes costs each rank m read and m written; a reduce-scatter to shards of m
// bytes on n ranks n m read and m written. An all-reduce gains nothing so (architecture.md).
//
// A peer may change its input as soon as its call has ended. It ends well only after all have
// published. If it fails, it tells all members first: so a rank that has read and then sees no
// failure has read what the peer gave.
//
// All go on as TwoShot if an input lies in a process's own memory, and
//   - the call is a reduce-scatter,
//   - some rank may not read a peer's memory (ptrace scope, seccomp),
//   - an all-to-all is in place, or
//   - rank 0 has chosen slots, because they have cost it less.
// All see that in the arrival lines. So they do if a rank could not read what lies at a peer's
// address: whoever sees that copies no further, and all see it before they end.
#pragma once

#include <optional>

#include "engine/operation.h"
#include "engine/operations/arrival.h"
#include "engine/operations/two_shot.h"
#include "engine/shards.h"
#include "kernels/kernels.h"

namespace pycollective {

class SingleCopy final : public Operation {
 public:
  // Inputs of up to so many bytes a rank are copied into small buffers if they are no shared
  // arrays: of more, a system call costs less than a second copy. Such a call needs no wait at the
  // end, so an asynchronous one ends on the caller's thread.
  static constexpr std::size_t kMostInSmallBuffer = std::size_t{32} << 10;

  // Whether this path serves the request. Depends only on what all ranks agree on.
  static bool fits(const Group& group, const Request& request);

  SingleCopy(Group& group, const Task& task, std::uint64_t sequence);

  void start() override;
  State advance() override;
  bool is_short() const override {
    return !reduces(request_.kind) && shards_.longest() * element_ <= kMostInSmallBuffer;
  }
  bool finished_by(Member member) const override;
  void compare_calls() const override { arrival_.compare_arrived(); }
  bool called_by(Member member) const override { return arrival_.arrived(member); }

 private:
  enum class Stage { kArrival, kCopy, kWait };

  // A part of a rank's input, and where it goes in this rank's output. In bytes.
  struct Part {
    std::size_t from;
    std::size_t to;
    std::size_t length;
  };

  std::uint64_t input_word();
  std::uint64_t input_place();
  bool begin();  // false: not as a single copy
  State end();   // rank 0 learns what the call has cost
  bool is_in_small_buffer(std::uint64_t word) const;
  void reduce_piece();
  // Copies up to kCopyPiece bytes. False: a peer's memory could not be read.
  bool copy_piece();
  bool copy_from(Member member, const Part& part, std::size_t bytes);
  State go_on_as_two_shot();
  // Whether data go from one member's input to the other's output.
  bool moves(Member from, Member to) const;
  Part part_from(Member member) const;
  bool has_read(Member member) const {
    return group_.mailbox(member).progress.combined.load(std::memory_order_acquire) > base_;
  }
  // Whether some rank could not read. Once all have read, all ranks find the same.
  bool was_refused() const;

  ArrivalBarrier arrival_;
  Shards shards_;
  std::size_t element_;  // bytes
  Chooser& paths_;
  bool measures_ = false;       // of this rank: both paths serve, and it is rank 0
  bool through_slots_ = false;  // as rank 0 has chosen
  CallTimer timer_;
  std::uint64_t base_;  // chunks of earlier operations, on every rank
  Stage stage_ = Stage::kArrival;
  bool must_wait_ = false;  // until all have read
  int step_ = 0;            // from which member it copies, around the ring from this one
  std::size_t copied_ = 0;  // bytes of that member's part, or reduced elements of the own shard
  ReduceFn reduce_ = nullptr;
  std::optional<TwoShot> two_shot_;
};

}  // namespace pycollective
