#include "engine/point_to_point.h"

#include <algorithm>

#include "engine/called.h"
#include "engine/copy.h"

namespace pycollective {

PairOperation::PairOperation(Group& group, const Request& request, std::uint64_t sequence,
                             Channel& mine, Channel& theirs)
    : Operation(group, request, sequence),
      mine_(mine),
      theirs_(theirs),
      peer_(*group.member_of(request.root)),
      bytes_(request.count * size_of(request.dtype)),
      begin_(mine.chunks.load(std::memory_order_relaxed)),
      end_(begin_ + (bytes_ + kChannelPart - 1) / kChannelPart),
      next_(begin_) {}

bool PairOperation::finished_by(Member member) const {
  return member != peer_ || (posted() && theirs_.chunks.load(std::memory_order_acquire) >= end_);
}

void PairOperation::post() {
  Channel::Post& post = mine_.post[sequence_ & 1];
  post.dtype = static_cast<std::uint64_t>(request_.dtype);
  post.count = request_.count;
  group_.publish(post.sequence, sequence_);
}

bool PairOperation::agreed() {
  if (agreed_) return true;
  if (!posted()) return false;
  const Channel::Post& theirs = theirs_.post[sequence_ & 1];
  if (theirs.dtype != static_cast<std::uint64_t>(request_.dtype) ||
      theirs.count != request_.count) {
    Request other = request_;
    other.kind = request_.kind == OpKind::kSend ? OpKind::kRecv : OpKind::kSend;
    other.dtype = static_cast<Dtype>(theirs.dtype);
    other.count = theirs.count;
    throw_pair_mismatch(
        {group_.world().rank, request_.kind, sequence_, describe(called(request_)),
         group_.describe(peer_), describe(called(other))},
        "as message number " + std::to_string(sequence_) + " from one to the other; no data moved");
  }
  agreed_ = true;
  return true;
}

std::size_t PairOperation::bytes_of(std::uint64_t chunk) const {
  return std::min(kChannelPart, bytes_ - (chunk - begin_) * kChannelPart);
}

Send::Send(Group& group, const Request& request, std::uint64_t sequence)
    : PairOperation(group, request, sequence,
                    group.sending_half(group.me(), *group.member_of(request.root)),
                    group.receiving_half(*group.member_of(request.root), group.me())) {}

void Send::start() {
  if (mine_.buffer == 0) mine_.buffer = group_.allocate_channel_buffer(kChannelBuffer);
  post();
}

State Send::advance() {
  if (!agreed()) return State::kBlocked;
  const std::uint64_t read = theirs_.chunks.load(std::memory_order_acquire);
  if (next_ == end_) return read >= end_ ? State::kDone : State::kBlocked;
  if (next_ >= read + 2) return State::kBlocked;  // both halves are full
  copy_bytes(group_.segment_of(group_.me(), mine_.buffer) + (next_ & 1) * kChannelPart,
             static_cast<const std::byte*>(request_.input) + (next_ - begin_) * kChannelPart,
             bytes_of(next_));
  group_.publish(mine_.chunks, ++next_);
  return State::kProgressed;
}

Receive::Receive(Group& group, const Request& request, std::uint64_t sequence)
    : PairOperation(group, request, sequence,
                    group.receiving_half(group.me(), *group.member_of(request.root)),
                    group.sending_half(*group.member_of(request.root), group.me())) {}

State Receive::advance() {
  if (!agreed()) return State::kBlocked;
  if (next_ == end_) return State::kDone;
  if (theirs_.chunks.load(std::memory_order_acquire) <= next_) return State::kBlocked;
  copy_bytes(static_cast<std::byte*>(request_.output) + (next_ - begin_) * kChannelPart,
             group_.segment_of(peer_, theirs_.buffer) + (next_ & 1) * kChannelPart,
             bytes_of(next_));
  group_.publish(mine_.chunks, ++next_);
  return next_ == end_ ? State::kDone : State::kProgressed;
}

}  // namespace pycollective
