#include "engine/internode/messenger.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "engine/failure_text.h"
#include "engine/waiting_time.h"
#include "kernels/copy.h"
#include "per_process.h"

namespace pycollective {
namespace {

constexpr std::chrono::milliseconds kListenAgain{100};
constexpr std::chrono::milliseconds kProbeAgain{200};
constexpr std::size_t kControlBytes = 1024;
// The last messages of a peer that has left may still be on their way. They come one by one, since
// one receive at a time is posted for the calls of a lane.
constexpr std::chrono::milliseconds kLastMessages{300};
// A connection's end may be seen before the goodbye that was sent before it.
constexpr std::chrono::milliseconds kLastGoodbye{20};
// If this rank awaits nothing from that one: a rank that does will tell all others.
constexpr std::chrono::milliseconds kLateGoodbye{500};
constexpr std::chrono::milliseconds kGiveUpWithin{500};
// However slowly the messages leave one after the other.
constexpr std::chrono::seconds kSentWithin{30};
// After a failure: a peer may have heard of it from others, and then receives no more messages.
constexpr std::chrono::milliseconds kToldWithin{50};
constexpr std::chrono::microseconds kWaitStep{100};

// Keeps it reachable, for leak checkers.
template <class T>
void keep_for_ever(T value) {
  struct Kept {
    std::mutex mutex;
    std::vector<std::unique_ptr<T>> all;
  };
  static PerProcess<Kept> kept;
  const std::lock_guard lock(kept->mutex);
  kept->all.push_back(std::make_unique<T>(std::move(value)));
}

}  // namespace

Messenger::Messenger(std::shared_ptr<Link> link, std::uint64_t id, int rank, std::vector<int> ranks,
                     std::function<void()> wake)
    : link_(std::move(link)),
      id_(id),
      rank_(rank),
      ranks_(std::move(ranks)),
      link_wakes_(link_->wake_with(std::move(wake))),
      // A link that wakes threads receives also while nobody polls: so there must be a receive for
      // a reminder and a failure, or a goodbye, of each rank. Other links keep messages until
      // asked.
      control_(link_wakes_ ? 2 * std::max<std::size_t>(ranks_.size(), 1) : 1) {
  const std::lock_guard lock(mutex_);
  for (Inbox& inbox : control_) {
    inbox.buffer = MessageBuffer(kControlBytes);
    listen(inbox);
  }
}

// Makes progress meanwhile, and releases the lock between looks.
template <class Done>
bool Messenger::wait_for(std::unique_lock<std::mutex>& lock, std::chrono::milliseconds limit,
                         const Done& done) {
  WaitingTime time(WaitingTime::Seconds(limit).count());
  for (;;) {
    try {
      link_->progress();
      if (!closing_) hear();  // once closing, those receives are cancelled, too
      if (done()) return true;
    } catch (const std::exception&) {
      return false;
    }
    if (time.is_over(Clock::now())) return false;
    lock.unlock();
    std::this_thread::sleep_for(kWaitStep);
    lock.lock();
  }
}

Messenger::~Messenger() {
  if (close()) return;
  // The link may still read or write any of this: it is never freed.
  keep_for_ever(link_);
  keep_for_ever(std::move(sent_));
  keep_for_ever(std::move(orphans_));
  keep_for_ever(std::move(staging_));
  keep_for_ever(std::move(control_));
  keep_for_ever(std::move(peers_));
}

void Messenger::poll() {
  std::vector<Orphan> ended;  // destroyed without the lock
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

// Messages of operations.

MessageHandle Messenger::send(int rank, int lane, const void* data, std::size_t bytes,
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

MessageHandle Messenger::receive(int rank, int lane, void* data, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  const auto transfer = link_->receive(rank, lane, data, bytes);
  Peer& peer = peers_[rank];
  peer.talked = true;
  peer.under_way.push_back(transfer);
  ++peer.awaited, ++awaited_;
  return {transfer, rank};
}

bool Messenger::done(MessageHandle& handle) {
  if (handle.transfer == 0) return true;
  const std::lock_guard lock(mutex_);
  if (handle.transfer == MessageHandle::kSpent) return false;
  const Link::Outcome outcome = look_at(handle.transfer);
  if (outcome == Link::Outcome::kUnderWay) return false;
  Peer& peer = peers_[handle.rank];
  if (outcome != Link::Outcome::kDone) {
    // It stays awaited, and look_for_lost() finds out why.
    peer.needed = true;
    has_losses_ = true;
    forget(peer, handle.transfer);
    handle.transfer = MessageHandle::kSpent;
    return false;
  }
  note_news(peer);
  close_handle(handle);
  handle.transfer = 0;
  return true;
}

bool Messenger::has_come(const MessageHandle& handle) {
  if (handle.transfer == 0) return true;
  const std::lock_guard lock(mutex_);
  if (handle.transfer == MessageHandle::kSpent) return false;
  bool news = false;
  const bool come = is_seen_done(handle.transfer, news);
  if (news) note_news(peers_[handle.rank]);
  return come;
}

Link::Outcome Messenger::look_at(Link::Transfer transfer) {
  const auto seen = seen_.find(transfer);
  if (seen == seen_.end()) return link_->test(transfer);
  const Link::Outcome outcome = seen->second;
  seen_.erase(seen);
  return outcome;
}

bool Messenger::is_seen_done(Link::Transfer transfer, bool& news) {
  const auto seen = seen_.find(transfer);
  if (seen != seen_.end()) return seen->second == Link::Outcome::kDone;
  const Link::Outcome outcome = link_->test(transfer);
  if (outcome != Link::Outcome::kUnderWay) seen_[transfer] = outcome;
  news = news || outcome == Link::Outcome::kDone;
  return outcome == Link::Outcome::kDone;
}

void Messenger::close_handle(const MessageHandle& handle) {
  Peer& peer = peers_[handle.rank];
  --peer.awaited, --awaited_;
  forget(peer, handle.transfer);
}

void Messenger::forget(Peer& peer, Link::Transfer transfer) {
  const auto found = std::find(peer.under_way.begin(), peer.under_way.end(), transfer);
  if (found == peer.under_way.end()) return;  // lost before
  *found = peer.under_way.back();
  peer.under_way.pop_back();
}

void Messenger::give_up(std::vector<MessageHandle> handles,
                        std::shared_ptr<const void> keep) noexcept {
  std::unique_lock lock(mutex_);
  for (MessageHandle& each : handles) {
    if (each.transfer == 0) continue;
    close_handle(each);
    if (seen_.erase(each.transfer) != 0) each.transfer = MessageHandle::kSpent;
    if (each.transfer != MessageHandle::kSpent) link_->cancel(each.transfer);
  }
  const auto ended = [&] {
    const auto gone = [&](const MessageHandle& each) {
      return each.transfer == 0 || each.transfer == MessageHandle::kSpent ||
             link_->test(each.transfer) != Link::Outcome::kUnderWay;
    };
    handles.erase(std::remove_if(handles.begin(), handles.end(), gone), handles.end());
    return handles.empty();
  };
  // One deadline for everything that a failure leaves under way: each wait may be in vain.
  if (!give_up_until_) give_up_until_ = Clock::now() + kGiveUpWithin;
  const auto left = *give_up_until_ - Clock::now();
  if (wait_for(lock, std::chrono::duration_cast<std::chrono::milliseconds>(left), ended)) return;
  for (const MessageHandle& each : handles) orphans_.push_back({each.transfer, keep});
  if (closing_) let_go_ = false;
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

// The library's own messages.

MessageBuffer Messenger::buffer(std::size_t body_bytes) {
  if (body_bytes != kCallBytes || spare_.empty()) return MessageBuffer(body_bytes);
  MessageBuffer one = std::move(spare_.back());
  spare_.pop_back();
  return one;
}

void Messenger::post(MessageBuffer buffer, MessageKind kind, std::size_t bytes, int rank,
                     int lane) {
  MessageHeader& header = buffer.header();
  header.communicator = id_;
  header.magic = MessageBuffer::kMagic;
  header.bytes = static_cast<std::uint32_t>(bytes);
  header.sender = rank_;
  header.kind = kind;
  header.unused = 0;
  const auto transfer = link_->send(rank, lane, buffer.data(), buffer.length(), false);
  count(buffer.length(), buffer.length());
  sent_.push_back({transfer, std::move(buffer)});
}

void Messenger::count(std::size_t bytes, std::size_t raw_bytes) {
  ++traffic_.messages;
  traffic_.bytes += bytes;
  traffic_.raw_bytes += raw_bytes;
}

void Messenger::say(MessageKind kind, FailureKind failure, const void* body, std::size_t bytes,
                    int rank) {
  MessageBuffer message(bytes);
  message.header().failure = static_cast<std::uint8_t>(failure);
  copy_bytes(message.body(), body, bytes);
  post(std::move(message), kind, bytes, rank, kLaneControl);
}

void Messenger::reap(bool all) {
  const auto gone = [&](Sent& each) {
    if (link_->test(each.transfer) == Link::Outcome::kUnderWay) return false;
    if (!all && each.buffer.body_bytes() == kCallBytes && spare_.size() < kMostSpare)
      spare_.push_back(std::move(each.buffer));
    return true;
  };
  sent_.erase(std::remove_if(sent_.begin(), sent_.end(), gone), sent_.end());
  reap_at_ = std::max<std::size_t>(16, 2 * sent_.size());
}

std::byte* Messenger::staging(std::size_t index, std::size_t bytes) {
  if (staging_.size() <= index) staging_.resize(index + 1);
  if (staging_[index].size() < bytes) staging_[index].resize(bytes);
  return staging_[index].data();
}

// The calls of operations: what ranks tell each other before data move.

MessageBuffer Messenger::make_call(const NumberedCall& note, std::size_t data_bytes) {
  MessageBuffer call;
  {
    const std::lock_guard lock(mutex_);
    call = buffer(kCallBytes);
  }
  call.header().bytes = static_cast<std::uint32_t>(sizeof(note) + data_bytes);
  std::memcpy(call.body(), &note, sizeof(note));
  return call;
}

NumberedCall Messenger::note_of(const MessageBuffer& call) {
  NumberedCall note;
  std::memcpy(&note, call.body(), sizeof(note));
  return note;
}

void Messenger::send_call(int rank, int lane, MessageBuffer call) {
  const std::lock_guard lock(mutex_);
  peers_[rank].talked = true;
  const std::size_t bytes = call.header().bytes;
  post(std::move(call), MessageKind::kCall, bytes, rank, lane);
}

void Messenger::send_and_expect_call(int rank, int lane, MessageBuffer call, int answer,
                                     bool expects) {
  const std::lock_guard lock(mutex_);
  Peer& peer = peers_[rank];
  peer.talked = true;
  if (expects) {
    ++peer.awaited, ++awaited_;
    open(peer, answer, rank);
  }
  const std::size_t bytes = call.header().bytes;
  post(std::move(call), MessageKind::kCall, bytes, rank, lane);
}

void Messenger::expect_call(int rank, int lane) {
  const std::lock_guard lock(mutex_);
  Peer& peer = peers_[rank];
  open(peer, lane, rank);
  peer.talked = true;
  ++peer.awaited, ++awaited_;
}

MessageBuffer Messenger::take_call(int rank, int lane, bool more) {
  const std::lock_guard lock(mutex_);
  MessageBuffer call = next_call(peers_[rank], rank, lane, more, true);
  if (call) --peers_[rank].awaited, --awaited_;
  return call;
}

MessageBuffer Messenger::hear_call(int rank, int lane, bool more, bool needed) {
  const std::lock_guard lock(mutex_);
  Peer& peer = peers_[rank];
  MessageBuffer call = next_call(peer, rank, lane, more, needed);
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

void Messenger::open(Peer& peer, int lane, int rank) {
  Inbox& inbox = peer.inboxes[lane];
  if (inbox.transfer != 0) return;
  inbox.buffer = buffer(kCallBytes);
  inbox.transfer = link_->receive(rank, lane, inbox.buffer.data(), inbox.buffer.capacity());
}

MessageBuffer Messenger::next_call(Peer& peer, int rank, int lane, bool more, bool needed) {
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
  MessageBuffer call = std::move(inbox.buffer);
  inbox.buffer = {};
  if (!knows(call) || call.header().kind != MessageKind::kCall || call.header().sender != rank ||
      call.header().bytes < sizeof(NumberedCall))
    throw CollectiveFailure(
        Failure::of_no_operation(FailureKind::kAborted, rank_,
                                 "rank " + std::to_string(rank_) + " received from rank " +
                                     std::to_string(rank) + " what is no call of this library"));
  if (more) open(peer, lane, rank);
  return call;
}

void Messenger::forget_call(int rank) {
  const std::lock_guard lock(mutex_);
  --peers_[rank].awaited, --awaited_;
}

void Messenger::put_back(MessageBuffer call) {
  const std::lock_guard lock(mutex_);
  if (call.body_bytes() == kCallBytes && spare_.size() < kMostSpare)
    spare_.push_back(std::move(call));
}

void Messenger::await_anyone(bool begins) {
  const std::lock_guard lock(mutex_);
  awaited_ += begins ? 1 : -1;
}

bool Messenger::anyone_is_there() const {
  const std::lock_guard lock(mutex_);
  return !all_have_left();
}

void Messenger::remind(const std::vector<int>& ranks, const NumberedCall& note) {
  const std::lock_guard lock(mutex_);
  for (const int rank : ranks)
    say(MessageKind::kReminder, FailureKind::kNone, &note, sizeof(note), rank);
}

std::optional<std::pair<int, NumberedCall>> Messenger::find_other_call(
    const NumberedCall& mine) const {
  const std::lock_guard lock(mutex_);
  for (const auto& [rank, peer] : peers_)
    if (peer.reminder && peer.reminder->sequence == mine.sequence && !peer.reminder->agrees(mine))
      return std::make_pair(rank, *peer.reminder);
  return std::nullopt;
}

// Failures and goodbyes.

void Messenger::listen(Inbox& inbox) {
  const MessageBuffer& buffer = inbox.buffer;
  try {
    inbox.transfer = link_->receive(Link::kAnyRank, kLaneControl, buffer.data(), buffer.capacity());
  } catch (const std::exception&) {
    // A connection has ended with a message on it that nobody took.
    inbox.transfer = 0;
    listen_again_ = Clock::now() + kListenAgain;
  }
}

void Messenger::hear() {
  // Messages fill the receives in the order in which these were posted, so the oldest comes first.
  for (std::size_t looked_at = 0; looked_at < control_.size(); ++looked_at) {
    Inbox& inbox = control_[oldest_];
    if (inbox.transfer != 0) {
      const Link::Outcome outcome = link_->test(inbox.transfer);
      if (outcome == Link::Outcome::kUnderWay) return;
      inbox.transfer = 0;
      if (outcome == Link::Outcome::kDone)
        take_in(inbox.buffer);
      else
        listen_again_ = Clock::now() + kListenAgain;
    }
    if (Clock::now() >= listen_again_) listen(inbox);
    oldest_ = (oldest_ + 1) % control_.size();
  }
}

bool Messenger::knows(const MessageBuffer& buffer) const {
  return buffer.is_sound() && buffer.header().communicator == id_ &&
         std::binary_search(ranks_.begin(), ranks_.end(), buffer.header().sender);
}

void Messenger::take_in(const MessageBuffer& buffer) {
  // MPI may deliver the last messages of an earlier communicator.
  if (buffer.is_sound() && buffer.header().communicator != id_) return;
  const auto kind = static_cast<FailureKind>(buffer.header().failure);
  const bool failure = buffer.header().kind == MessageKind::kFailure;
  if (!knows(buffer) ||
      (failure && (kind <= FailureKind::kNone || kind >= FailureKind::kConfiguration)))
    return set_notice({FailureKind::kAborted, rank_,
                       "rank " + std::to_string(rank_) +
                           " received from another host what is no message of this library"});
  const MessageHeader& header = buffer.header();
  Peer& peer = peers_[header.sender];
  switch (header.kind) {
    case MessageKind::kFailure:
      failed_ = true;
      return set_notice({kind, header.sender,
                         std::string(reinterpret_cast<const char*>(buffer.body()), header.bytes)});
    case MessageKind::kGoodbye:
      peer.left = Clock::now();
      has_losses_ = true;
      return;
    case MessageKind::kReminder:
      if (header.bytes == sizeof(NumberedCall)) peer.reminder = note_of(buffer);
      return;
    case MessageKind::kCall:
      return;
  }
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
  for (const int rank : ranks_) {
    const auto known = peers_.find(rank);
    const bool talked = known != peers_.end() && known->second.talked;
    const bool gone = known != peers_.end() && (known->second.left || known->second.lost);
    if (gone || !(first || talked)) continue;
    try {
      say(MessageKind::kFailure, notice.kind, notice.report.data(), bytes, rank);
    } catch (const std::exception&) {
      continue;  // unreachable; others may pass it on
    }
  }
}

void Messenger::set_notice(Notice notice) {
  if (notice_) return;
  notice_ = std::make_shared<const Notice>(std::move(notice));
  has_notice_.store(true, std::memory_order_release);
}

// Ranks that have left, or cannot be reached any more.

void Messenger::probe() {
  const std::lock_guard lock(mutex_);
  if (closing_ || Clock::now() < probe_again_) return;
  probe_again_ = Clock::now() + kProbeAgain;
  reap(false);
  for (const int rank : ranks_) {
    const auto known = peers_.find(rank);
    if (known != peers_.end() && (known->second.left || known->second.lost)) continue;
    try {
      say(MessageKind::kReminder, FailureKind::kNone, nullptr, 0, rank);
    } catch (const std::exception&) {
      continue;  // as tell()
    }
  }
}

std::vector<int> Messenger::gone() const {
  const std::lock_guard lock(mutex_);
  std::vector<int> ranks;
  for (const auto& [rank, peer] : peers_)
    if (peer.left || peer.lost) ranks.push_back(rank);
  return ranks;
}

void Messenger::note_news(Peer& peer) {
  if (peer.left) peer.left = Clock::now();
}

bool Messenger::misses(Peer& peer) {
  int come = peer.heard;
  bool news = false;
  for (const Link::Transfer each : peer.under_way) {
    if (!is_seen_done(each, news)) return true;
    ++come;
  }
  for (auto& [lane, inbox] : peer.inboxes) {
    if (inbox.transfer != 0 && !inbox.come) {
      const Link::Outcome outcome = link_->test(inbox.transfer);
      inbox.come = outcome == Link::Outcome::kDone;
      news = news || inbox.come;
      if (!inbox.come && outcome != Link::Outcome::kUnderWay) inbox.transfer = 0;
    }
    come += inbox.come ? 1 : 0;
  }
  if (news) note_news(peer);
  return !news && come < peer.awaited;
}

void Messenger::look_for_lost() {
  if (notice_) return;
  const Clock::time_point now = Clock::now();
  const auto found = [&](int rank, const std::string& how, bool closed) {
    set_notice({FailureKind::kPeerFailure, rank_,
                loss_text("rank " + std::to_string(rank) + how, rank, rank_, closed)});
  };
  for (auto& [rank, peer] : peers_) {
    if (peer.left) {
      // A message that has come, and at which the operation has not looked, is not missed.
      if (peer.needed || (peer.awaited > 0 && now - *peer.left > kLastMessages && misses(peer)))
        return found(rank, " closed its communicator before it finished its part", true);
      continue;
    }
    const bool directly = peer.awaited > 0 || peer.needed;
    if (peer.lost && awaited_ > 0 && now - *peer.lost > (directly ? kLastGoodbye : kLateGoodbye))
      return found(rank, " died or cannot be reached any more (" + peer.how + ")", false);
  }
}

// The end of a messenger.

bool Messenger::close() noexcept {
  std::vector<Orphan> orphans;  // destroyed without the lock
  std::unique_lock lock(mutex_);
  if (closing_) return let_go_;
  // It still receives while it closes: others may say goodbye at the same time, and wait for this.
  if (!failed_)
    for (const int rank : ranks_) {
      const auto known = peers_.find(rank);
      if (known != peers_.end() && (known->second.left || known->second.lost)) continue;
      try {
        say(MessageKind::kGoodbye, FailureKind::kNone, nullptr, 0, rank);
      } catch (const std::exception&) {
        continue;
      }
    }
  const auto all_sent = [&] {
    reap(true);
    return sent_.empty();
  };
  const Clock::time_point until = Clock::now() + kSentWithin;
  std::size_t before = 0;
  do before = sent_.size();
  while (!wait_for(lock, failed_ ? kToldWithin : kGiveUpWithin, all_sent) && !failed_ &&
         sent_.size() < before && Clock::now() < until);
  closing_ = true;
  std::vector<Link::Transfer> open;
  close_is_deferred_ = link_->must_be_quiet() && !failed_ && !all_have_left();
  for (const Inbox& inbox : control_)
    if (inbox.transfer != 0 && !close_is_deferred_) open.push_back(inbox.transfer);
  for (const auto& [rank, peer] : peers_)
    for (const auto& [lane, inbox] : peer.inboxes)
      if (inbox.transfer != 0 && !inbox.come) open.push_back(inbox.transfer);
  for (const Sent& each : sent_) open.push_back(each.transfer);
  for (const Orphan& each : orphans_) open.push_back(each.transfer);
  for (const Link::Transfer each : open) link_->cancel(each);
  const auto ended = [&] {
    const auto gone = [&](Link::Transfer each) {
      return link_->test(each) != Link::Outcome::kUnderWay;
    };
    open.erase(std::remove_if(open.begin(), open.end(), gone), open.end());
    return open.empty();
  };
  let_go_ = wait_for(lock, kGiveUpWithin, ended);
  if (!let_go_) close_is_deferred_ = false;
  if (!close_is_deferred_) link_->close(let_go_ && !failed_ && all_have_left());
  if (let_go_) {
    sent_.clear();
    orphans.swap(orphans_);
  }
  return let_go_;
}

bool Messenger::all_have_left() const {
  return std::all_of(ranks_.begin(), ranks_.end(), [&](int rank) {
    const auto known = peers_.find(rank);
    return known != peers_.end() && known->second.left;
  });
}

bool Messenger::has_ended() noexcept {
  std::unique_lock lock(mutex_);
  if (!close_is_deferred_) return true;
  try {
    link_->progress();
    hear();
  } catch (const std::exception&) {
    return false;
  }
  if (failed_ || !all_have_left() || !deaf(lock)) return false;  // never after a failure
  link_->close(true);
  close_is_deferred_ = false;
  return true;
}

void Messenger::stop_listening() noexcept {
  std::unique_lock lock(mutex_);
  if (close_is_deferred_) deaf(lock);
}

// Cancels the receive on which it listens.
bool Messenger::deaf(std::unique_lock<std::mutex>& lock) {
  Inbox& inbox = control_.front();
  if (inbox.transfer != 0) link_->cancel(inbox.transfer);
  return wait_for(lock, kToldWithin, [&] {
    if (inbox.transfer != 0 && link_->test(inbox.transfer) == Link::Outcome::kUnderWay)
      return false;
    inbox.transfer = 0;
    return true;
  });
}

namespace {

struct DeferredCloses {
  std::mutex mutex;
  std::vector<std::shared_ptr<Messenger>> all;
};

// At the end of the process there may be no MPI any more: they are never destroyed.
PerProcess<DeferredCloses> deferred;

}  // namespace

void defer_close(std::shared_ptr<Messenger> messenger) {
  const std::lock_guard lock(deferred->mutex);
  deferred->all.push_back(std::move(messenger));
}

void finish_deferred_closes() {
  const std::lock_guard lock(deferred->mutex);
  auto& all = deferred->all;
  all.erase(
      std::remove_if(all.begin(), all.end(), [](const auto& each) { return each->has_ended(); }),
      all.end());
}

void give_up_deferred_closes() {
  const std::lock_guard lock(deferred->mutex);
  for (const auto& each : deferred->all) each->stop_listening();
}

}  // namespace pycollective
