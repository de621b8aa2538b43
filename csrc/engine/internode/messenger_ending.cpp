// How messages end that nobody wants any more, and how a messenger does.
#include <algorithm>
#include <thread>

#include "engine/internode/messenger.h"
#include "engine/waiting_time.h"
#include "per_process.h"

namespace pycollective {
namespace {

constexpr std::chrono::milliseconds kGiveUpWithin{500};
// However slowly one after the other leaves of what was sent.
constexpr std::chrono::seconds kSentWithin{30};
// Of a failure a peer may have heard from others, and then it takes no more notices.
constexpr std::chrono::milliseconds kToldWithin{50};
constexpr std::chrono::microseconds kWaitStep{100};

// Where leak checkers find it.
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

// Lets all go on meanwhile, and others have the lock.
template <class Done>
bool Messenger::wait_for(std::unique_lock<std::mutex>& lock, std::chrono::milliseconds limit,
                         const Done& done) {
  WaitingTime time(WaitingTime::Seconds(limit).count());
  for (;;) {
    try {
      link_->progress();
      if (!closing_) hear();  // then what was heard last is taken back, too
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
  // The link may still read or write any of this: it is never given back.
  keep_for_ever(link_);
  keep_for_ever(std::move(sent_));
  keep_for_ever(std::move(orphans_));
  keep_for_ever(std::move(staging_));
  keep_for_ever(std::move(control_));
  keep_for_ever(std::move(peers_));
}

void Messenger::give_up(std::vector<Ticket> tickets, std::shared_ptr<const void> keep) noexcept {
  std::unique_lock lock(mutex_);
  for (Ticket& each : tickets) {
    if (each.transfer == 0) continue;
    close_ticket(each);
    if (seen_.erase(each.transfer) != 0) each.transfer = Ticket::kSpent;
    if (each.transfer != Ticket::kSpent) link_->cancel(each.transfer);
  }
  const auto ended = [&] {
    const auto gone = [&](const Ticket& each) {
      return each.transfer == 0 || each.transfer == Ticket::kSpent ||
             link_->test(each.transfer) != Link::Outcome::kUnderWay;
    };
    tickets.erase(std::remove_if(tickets.begin(), tickets.end(), gone), tickets.end());
    return tickets.empty();
  };
  // Once for all that a failure leaves: each might wait in vain.
  if (!give_up_until_) give_up_until_ = Clock::now() + kGiveUpWithin;
  const auto left = *give_up_until_ - Clock::now();
  if (wait_for(lock, std::chrono::duration_cast<std::chrono::milliseconds>(left), ended)) return;
  for (const Ticket& each : tickets) orphans_.push_back({each.transfer, keep});
  if (closing_) let_go_ = false;
}

bool Messenger::close() noexcept {
  std::vector<Orphan> orphans;  // let go of without the lock
  std::unique_lock lock(mutex_);
  if (closing_) return let_go_;
  // Still heard while it closes: others may say goodbye at the same time, and wait for it.
  if (!failed_)
    for (const int rank : far_) {
      const auto known = peers_.find(rank);
      if (known != peers_.end() && (known->second.left || known->second.lost)) continue;
      try {
        say(ParcelKind::kGoodbye, FailureKind::kNone, nullptr, 0, rank);
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
  lingers_ = link_->must_be_quiet() && !failed_ && !all_have_left();
  for (const Inbox& inbox : control_)
    if (inbox.transfer != 0 && !lingers_) open.push_back(inbox.transfer);
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
  if (!let_go_) lingers_ = false;
  if (!lingers_) link_->close(let_go_ && !failed_ && all_have_left());
  if (let_go_) {
    sent_.clear();
    orphans.swap(orphans_);
  }
  return let_go_;
}

bool Messenger::all_have_left() const {
  return std::all_of(far_.begin(), far_.end(), [&](int rank) {
    const auto known = peers_.find(rank);
    return known != peers_.end() && known->second.left;
  });
}

bool Messenger::has_ended() noexcept {
  std::unique_lock lock(mutex_);
  if (!lingers_) return true;
  try {
    link_->progress();
    hear();
  } catch (const std::exception&) {
    return false;
  }
  if (failed_ || !all_have_left() || !deaf(lock)) return false;  // after a failure for ever
  link_->close(true);
  lingers_ = false;
  return true;
}

void Messenger::stop_listening() noexcept {
  std::unique_lock lock(mutex_);
  if (lingers_) deaf(lock);
}

// Takes back what it listens with.
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

}  // namespace pycollective
