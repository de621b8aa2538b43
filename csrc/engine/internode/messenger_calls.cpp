// The calls of operations: what ranks tell each other before data move.
#include <cstring>

#include "engine/internode/messenger.h"

namespace pycollective {

Parcel Messenger::make_call(const CallNote& note, std::size_t data_bytes) {
  Parcel call;
  {
    const std::lock_guard lock(mutex_);
    call = parcel(kCallRoom);
  }
  call.header().bytes = static_cast<std::uint32_t>(sizeof(note) + data_bytes);
  std::memcpy(call.body(), &note, sizeof(note));
  return call;
}

CallNote Messenger::note_of(const Parcel& call) {
  CallNote note;
  std::memcpy(&note, call.body(), sizeof(note));
  return note;
}

void Messenger::send_call(int rank, int lane, Parcel call) {
  const std::lock_guard lock(mutex_);
  peers_[rank].talked = true;
  const std::size_t bytes = call.header().bytes;
  post(std::move(call), ParcelKind::kCall, bytes, rank, lane);
}

void Messenger::exchange_calls(int rank, int lane, Parcel call, int answer, bool expects) {
  const std::lock_guard lock(mutex_);
  Peer& peer = peers_[rank];
  peer.talked = true;
  if (expects) {
    ++peer.awaited, ++awaited_;
    open(peer, answer, rank);
  }
  const std::size_t bytes = call.header().bytes;
  post(std::move(call), ParcelKind::kCall, bytes, rank, lane);
}

void Messenger::expect_call(int rank, int lane) {
  const std::lock_guard lock(mutex_);
  Peer& peer = peers_[rank];
  open(peer, lane, rank);
  peer.talked = true;
  ++peer.awaited, ++awaited_;
}

Parcel Messenger::take_call(int rank, int lane, bool more) {
  const std::lock_guard lock(mutex_);
  Parcel call = next_call(peers_[rank], rank, lane, more, true);
  if (call) --peers_[rank].awaited, --awaited_;
  return call;
}

Parcel Messenger::hear_call(int rank, int lane, bool more, bool needed) {
  const std::lock_guard lock(mutex_);
  Peer& peer = peers_[rank];
  Parcel call = next_call(peer, rank, lane, more, needed);
  if (call) ++peer.heard;
  return call;
}

void Messenger::count_heard(int rank, int calls) {
  const std::lock_guard lock(mutex_);
  peers_[rank].heard += calls;
}

void Messenger::open_call(int rank, int lane) {
  const std::lock_guard lock(mutex_);
  open(peers_[rank], lane, rank);
}

Parcel Messenger::next_call(Peer& peer, int rank, int lane, bool more, bool needed) {
  Inbox& inbox = peer.inboxes[lane];
  if (inbox.transfer == 0) return {};
  const Link::Outcome outcome =
      std::exchange(inbox.come, false) ? Link::Outcome::kDone : link_->test(inbox.transfer);
  if (outcome == Link::Outcome::kUnderWay) return {};
  inbox.transfer = 0;
  if (outcome != Link::Outcome::kDone) {
    peer.needed = peer.needed || (needed && peer.awaited > 0);
    has_losses_ = true;
    return {};
  }
  note_news(peer);
  Parcel call = std::move(inbox.parcel);
  inbox.parcel = {};
  if (!knows(call) || call.header().kind != ParcelKind::kCall || call.header().sender != rank ||
      call.header().bytes < sizeof(CallNote))
    throw CollectiveFailure({FailureKind::kAborted, rank_, OpKind::kBarrier, 0,
                             "rank " + std::to_string(rank_) + " received from rank " +
                                 std::to_string(rank) + " what is no call of this library"});
  if (more) open(peer, lane, rank);
  return call;
}

void Messenger::forget_call(int rank) {
  const std::lock_guard lock(mutex_);
  --peers_[rank].awaited, --awaited_;
}

void Messenger::await_anyone(bool begins) {
  const std::lock_guard lock(mutex_);
  awaited_ += begins ? 1 : -1;
}

bool Messenger::anyone_is_there() const {
  const std::lock_guard lock(mutex_);
  return !all_have_left();
}

void Messenger::put_back(Parcel call) {
  const std::lock_guard lock(mutex_);
  if (call.room() == kCallRoom && spare_.size() < kMostSpare) spare_.push_back(std::move(call));
}

void Messenger::remind(const std::vector<int>& ranks, const CallNote& note) {
  const std::lock_guard lock(mutex_);
  for (const int rank : ranks)
    say(ParcelKind::kReminder, FailureKind::kNone, &note, sizeof(note), rank);
}

std::optional<std::pair<int, CallNote>> Messenger::find_other_call(const CallNote& mine) const {
  const std::lock_guard lock(mutex_);
  for (const auto& [rank, peer] : peers_)
    if (peer.reminder && peer.reminder->sequence == mine.sequence && !peer.reminder->agrees(mine))
      return std::make_pair(rank, *peer.reminder);
  return std::nullopt;
}

}  // namespace pycollective
