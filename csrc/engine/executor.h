// What a program's steps are on one kind of memory: the seam between the interpreter of programs
// (scheduled.h) and the memory that they move.
//
// The interpreter decides what happens when. It computes with addresses, of the caller's buffers
// and of slots, and leaves all that lies there to the executor: copies, combinations, and the words
// by which ranks of a host tell each other how far they are. Ranks of a group may have executors of
// different kinds, where these can read each other's slots; the words mean the same to all.
//
// On memory whose steps end later than they are handed over (a GPU's), an executor orders them:
// what was handed over before publish() is there for whoever sees the mark.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/kernels.h"
#include "transport/member.h"

namespace pycollective {

// One combination of a chunk: `count` elements of each term, in the order of the ranks.
struct Combining {
  Combination what;
  const Term* terms;
  bool only_leaves;  // of all ranks, into the result
  void* out;
  void* copy;  // or null
  std::size_t count;
};

class Executor {
 public:
  virtual ~Executor() = default;
  Executor() = default;
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  // Where a member's slots begin, for this rank.
  virtual std::byte* slots(Member member) const = 0;

  // `from` may be `to`; otherwise they do not overlap.
  virtual void copy(void* to, const void* from, std::size_t bytes) = 0;
  virtual void combine(const Combining& each) = 0;

  // What was handed over is the members' to read once they see `mark` in the slot.
  virtual void publish(std::size_t slot, std::uint64_t mark) = 0;
  // Whether a member has published as much, so that what is handed over from now on may read it.
  virtual bool has_published(Member member, std::size_t slot, std::uint64_t mark) = 0;

  // Chunks that a rank has done with since the group began, and reads nothing of any more; what it
  // wrote of them is its peers' to read.
  virtual std::uint64_t chunks_done() const = 0;
  virtual void publish_done(std::uint64_t chunks) = 0;
  // Whether a member has done with as many, so that what is handed over from now on may write where
  // it read.
  virtual bool has_done(Member member, std::uint64_t chunks) const = 0;
};

}  // namespace pycollective
