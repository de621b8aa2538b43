#include "engine/internode/messenger.h"

#include <algorithm>
#include <cstring>
#include <iterator>

namespace pycollective {
namespace {

constexpr std::chrono::milliseconds kListenAgain{100};
constexpr std::size_t kControlBytes = 1024;

}  // namespace

Messenger::Messenger(std::shared_ptr<Link> link, std::uint64_t id, int rank, std::vector<int> far,
                     std::function<void()> bell)
    : link_(std::move(link)),
      id_(id),
      rank_(rank),
      far_(std::move(far)),
      rings_(link_->ring_with(std::move(bell))),
      // A link that rings hears also while nobody looks: then there must be room for a reminder and
      // a failure, or a goodbye, of each rank. Other links keep what nobody has asked for.
      control_(rings_ ? 2 * std::max<std::size_t>(far_.size(), 1) : 1) {
  const std::lock_guard lock(mutex_);
  for (Inbox& inbox : control_) {
    inbox.parcel = Parcel(kControlBytes);
    listen(inbox);
  }
}

void Messenger::poll() {
  std::vector<Orphan> ended;  // let go of without the lock
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock || closing_) return;  // another thread does it
  try {
    link_->progress();
  } catch (const std::exception& error) {
    return set_notice(
        {FailureKind::kAborted, rank_,
         "the transport of rank " + std::to_string(rank_) + " failed: " + error.what()});
  }
  hear();
  if (!orphans_.empty()) ended = take_ended_orphans();
  if (sent_.size() >= reap_at_) reap(false);
  while (auto loss = link_->lost()) {
    Peer& peer = peers_[loss->rank];
    if (peer.lost) continue;
    peer.lost = Clock::now();
    peer.how = std::move(loss->how);
    has_losses_ = true;
  }
  if (has_losses_) look_for_lost();
}

Messenger::Traffic Messenger::sent() const {
  const std::lock_guard lock(mutex_);
  return traffic_;
}

Ticket Messenger::send(int rank, int lane, const void* data, std::size_t bytes,
                       std::size_t raw_bytes) {
  const std::lock_guard lock(mutex_);
  const auto transfer = link_->send(rank, lane, data, bytes, true);
  count(bytes, raw_bytes);
  Peer& peer = peers_[rank];
  peer.talked = true;
  peer.under_way.push_back(transfer);
  ++peer.awaited, ++awaited_;
  return {transfer, rank};
}

Ticket Messenger::receive(int rank, int lane, void* data, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  const auto transfer = link_->receive(rank, lane, data, bytes);
  Peer& peer = peers_[rank];
  peer.talked = true;
  peer.under_way.push_back(transfer);
  ++peer.awaited, ++awaited_;
  return {transfer, rank};
}

bool Messenger::done(Ticket& ticket) {
  if (ticket.transfer == 0) return true;
  const std::lock_guard lock(mutex_);
  if (ticket.transfer == Ticket::kSpent) return false;
  const Link::Outcome outcome = look_at(ticket.transfer);
  if (outcome == Link::Outcome::kUnderWay) return false;
  Peer& peer = peers_[ticket.rank];
  if (outcome != Link::Outcome::kDone) {
    // It stays awaited, and look_for_lost() says why.
    peer.needed = true;
    has_losses_ = true;
    forget(peer, ticket.transfer);
    ticket.transfer = Ticket::kSpent;
    return false;
  }
  note_news(peer);
  close_ticket(ticket);
  ticket.transfer = 0;
  return true;
}

Link::Outcome Messenger::look_at(Link::Transfer transfer) {
  const auto seen = seen_.find(transfer);
  if (seen == seen_.end()) return link_->test(transfer);
  const Link::Outcome outcome = seen->second;
  seen_.erase(seen);
  return outcome;
}

void Messenger::close_ticket(const Ticket& ticket) {
  Peer& peer = peers_[ticket.rank];
  --peer.awaited, --awaited_;
  forget(peer, ticket.transfer);
}

void Messenger::forget(Peer& peer, Link::Transfer transfer) {
  const auto found = std::find(peer.under_way.begin(), peer.under_way.end(), transfer);
  if (found == peer.under_way.end()) return;  // it was lost
  *found = peer.under_way.back();
  peer.under_way.pop_back();
}

std::shared_ptr<const Messenger::Notice> Messenger::notice() const {
  if (!has_notice_.load(std::memory_order_acquire)) return nullptr;
  const std::lock_guard lock(mutex_);
  return notice_;
}

void Messenger::tell(const Notice& notice, bool first) noexcept {
  const std::lock_guard lock(mutex_);
  failed_ = true;
  if (closing_) return;
  const std::size_t bytes = std::min(notice.report.size(), kControlBytes);
  for (const int rank : far_) {
    const auto known = peers_.find(rank);
    const bool talked = known != peers_.end() && known->second.talked;
    const bool gone = known != peers_.end() && (known->second.left || known->second.lost);
    if (gone || !(first || talked)) continue;
    try {
      say(ParcelKind::kFailure, notice.kind, notice.report.data(), bytes, rank);
    } catch (const std::exception&) {
      continue;  // it cannot be reached; others may pass it on
    }
  }
}

std::byte* Messenger::staging(std::size_t index, std::size_t bytes) {
  if (staging_.size() <= index) staging_.resize(index + 1);
  if (staging_[index].size() < bytes) staging_[index].resize(bytes);
  return staging_[index].data();
}

Parcel Messenger::parcel(std::size_t room) {
  if (room != kCallRoom || spare_.empty()) return Parcel(room);
  Parcel one = std::move(spare_.back());
  spare_.pop_back();
  return one;
}

void Messenger::post(Parcel parcel, ParcelKind kind, std::size_t bytes, int rank, int lane) {
  ParcelHeader& header = parcel.header();
  header.communicator = id_;
  header.magic = Parcel::kMagic;
  header.bytes = static_cast<std::uint32_t>(bytes);
  header.sender = rank_;
  header.kind = kind;
  header.unused = 0;
  const auto transfer = link_->send(rank, lane, parcel.data(), parcel.length(), false);
  count(parcel.length(), parcel.length());
  sent_.push_back({transfer, std::move(parcel)});
}

void Messenger::count(std::size_t bytes, std::size_t raw_bytes) {
  ++traffic_.messages;
  traffic_.bytes += bytes;
  traffic_.raw_bytes += raw_bytes;
}

void Messenger::say(ParcelKind kind, FailureKind failure, const void* body, std::size_t bytes,
                    int rank) {
  Parcel message(bytes);
  message.header().failure = static_cast<std::uint8_t>(failure);
  if (bytes != 0) std::memcpy(message.body(), body, bytes);
  post(std::move(message), kind, bytes, rank, kLaneControl);
}

void Messenger::listen(Inbox& inbox) {
  const Parcel& room = inbox.parcel;
  try {
    inbox.transfer = link_->receive(Link::kAnyRank, kLaneControl, room.data(), room.capacity());
  } catch (const std::exception&) {
    // A connection has ended with a message on it that nobody has taken.
    inbox.transfer = 0;
    listen_again_ = Clock::now() + kListenAgain;
  }
}

void Messenger::hear() {
  // Messages fill them in the order in which they were made ready, so the oldest comes first.
  for (std::size_t looked_at = 0; looked_at < control_.size(); ++looked_at) {
    Inbox& inbox = control_[oldest_];
    if (inbox.transfer != 0) {
      const Link::Outcome outcome = link_->test(inbox.transfer);
      if (outcome == Link::Outcome::kUnderWay) return;
      inbox.transfer = 0;
      if (outcome == Link::Outcome::kDone)
        take_in(inbox.parcel);
      else
        listen_again_ = Clock::now() + kListenAgain;
    }
    if (Clock::now() >= listen_again_) listen(inbox);
    oldest_ = (oldest_ + 1) % control_.size();
  }
}

bool Messenger::knows(const Parcel& parcel) const {
  return parcel.is_sound() && parcel.header().communicator == id_ &&
         std::binary_search(far_.begin(), far_.end(), parcel.header().sender);
}

void Messenger::take_in(const Parcel& parcel) {
  // MPI may bring the last words of an earlier communicator.
  if (parcel.is_sound() && parcel.header().communicator != id_) return;
  const auto kind = static_cast<FailureKind>(parcel.header().failure);
  const bool failure = parcel.header().kind == ParcelKind::kFailure;
  if (!knows(parcel) ||
      (failure && (kind <= FailureKind::kNone || kind >= FailureKind::kConfiguration)))
    return set_notice({FailureKind::kAborted, rank_,
                       "rank " + std::to_string(rank_) +
                           " received from another host what is no message of this library"});
  const ParcelHeader& header = parcel.header();
  Peer& peer = peers_[header.sender];
  switch (header.kind) {
    case ParcelKind::kFailure:
      failed_ = true;
      return set_notice({kind, header.sender,
                         std::string(reinterpret_cast<const char*>(parcel.body()), header.bytes)});
    case ParcelKind::kGoodbye:
      peer.left = Clock::now();
      has_losses_ = true;
      return;
    case ParcelKind::kReminder:
      if (header.bytes == sizeof(CallNote)) peer.reminder = note_of(parcel);
      return;
    case ParcelKind::kCall:
      return;
  }
}

void Messenger::open(Peer& peer, int lane, int rank) {
  Inbox& inbox = peer.inboxes[lane];
  if (inbox.transfer != 0) return;
  inbox.parcel = parcel(kCallRoom);
  inbox.transfer = link_->receive(rank, lane, inbox.parcel.data(), inbox.parcel.capacity());
}

std::vector<Messenger::Orphan> Messenger::take_ended_orphans() {
  const auto under_way = [&](const Orphan& each) {
    return link_->test(each.transfer) == Link::Outcome::kUnderWay;
  };
  const auto ended = std::partition(orphans_.begin(), orphans_.end(), under_way);
  std::vector<Orphan> taken(std::make_move_iterator(ended),
                            std::make_move_iterator(orphans_.end()));
  orphans_.erase(ended, orphans_.end());
  return taken;
}

void Messenger::reap(bool all) {
  const auto gone = [&](Sent& each) {
    if (link_->test(each.transfer) == Link::Outcome::kUnderWay) return false;
    if (!all && each.parcel.room() == kCallRoom && spare_.size() < kMostSpare)
      spare_.push_back(std::move(each.parcel));
    return true;
  };
  sent_.erase(std::remove_if(sent_.begin(), sent_.end(), gone), sent_.end());
  reap_at_ = std::max<std::size_t>(16, 2 * sent_.size());
}

void Messenger::set_notice(Notice notice) {
  if (notice_) return;
  notice_ = std::make_shared<const Notice>(std::move(notice));
  has_notice_.store(true, std::memory_order_release);
}

}  // namespace pycollective
