// send and recv: one direction of a pair of ranks, independent of the group's collectives.
//
// Both sides post what they called; when both have, and agree, the sender fills the two halves of
// its channel buffer in turn, and the receiver empties them. m bytes are written and read once. A
// send is done when the receiver has it all.
#pragma once

#include "engine/operation.h"

namespace pycollective {

constexpr std::size_t kChannelPart = std::size_t{32} << 10;
constexpr std::size_t kChannelBuffer = 2 * kChannelPart;

// What the two sides share: `mine` is the half that this rank writes, `theirs` the peer's.
class PairOperation : public Operation {
 public:
  bool finished_by(Member member) const override;
  bool called_by(Member member) const override { return member != peer_ || posted(); }

 protected:
  PairOperation(Group& group, const Request& request, std::uint64_t sequence, Channel& mine,
                Channel& theirs);
  void post();
  bool posted() const {
    return theirs_.post[sequence_ & 1].sequence.load(std::memory_order_acquire) >= sequence_;
  }
  // Whether the peer has posted. Throws CollectiveFailure (kMismatch), before data moves.
  bool agreed();
  std::size_t bytes_of(std::uint64_t chunk) const;

  Channel& mine_;
  Channel& theirs_;
  Member peer_;
  std::size_t bytes_;
  std::uint64_t begin_;  // chunks moved through the channel before this operation, and after it
  std::uint64_t end_;
  std::uint64_t next_;
  bool agreed_ = false;
};

class Send final : public PairOperation {
 public:
  Send(Group& group, const Request& request, std::uint64_t sequence);
  void start() override;
  State advance() override;
};

class Receive final : public PairOperation {
 public:
  Receive(Group& group, const Request& request, std::uint64_t sequence);
  void start() override { post(); }
  State advance() override;
};

}  // namespace pycollective
