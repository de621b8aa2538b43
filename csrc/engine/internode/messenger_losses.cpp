// What a messenger makes of ranks that have left, or cannot be reached any more.
#include "engine/internode/messenger.h"
#include "engine/watch.h"

namespace pycollective {
namespace {

// The last messages of a peer that has left may still be on their way to whoever waits for them:
// one comes after the other, since one receive at a time waits for the calls of a lane.
constexpr std::chrono::milliseconds kLastMessages{300};
// A connection's end may be seen before the goodbye that came before it.
constexpr std::chrono::milliseconds kLastGoodbye{20};
// Where nothing is awaited of that rank itself: who does await it tells all the others.
constexpr std::chrono::milliseconds kLateGoodbye{500};

}  // namespace

void Messenger::note_news(Peer& peer) {
  if (peer.left) peer.left = Clock::now();
}

bool Messenger::is_seen_done(Link::Transfer transfer, bool& news) {
  const auto seen = seen_.find(transfer);
  if (seen != seen_.end()) return seen->second == Link::Outcome::kDone;
  const Link::Outcome outcome = link_->test(transfer);
  if (outcome != Link::Outcome::kUnderWay) seen_[transfer] = outcome;
  news = news || outcome == Link::Outcome::kDone;
  return outcome == Link::Outcome::kDone;
}

bool Messenger::has_come(const Ticket& ticket) {
  if (ticket.transfer == 0) return true;
  const std::lock_guard lock(mutex_);
  if (ticket.transfer == Ticket::kSpent) return false;
  bool news = false;
  const bool come = is_seen_done(ticket.transfer, news);
  if (news) note_news(peers_[ticket.rank]);
  return come;
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
  const auto found = [&](int rank, const std::string& how) {
    set_notice({FailureKind::kPeerFailure, rank_,
                loss_text("rank " + std::to_string(rank) + how, rank, rank_)});
  };
  for (auto& [rank, peer] : peers_) {
    if (peer.left) {
      // What has come and waits for the operation to look at it is not missed.
      if (peer.needed || (peer.awaited > 0 && now - *peer.left > kLastMessages && misses(peer)))
        return found(rank, " closed its communicator before it finished its part");
      continue;
    }
    const bool directly = peer.awaited > 0 || peer.needed;
    if (peer.lost && awaited_ > 0 && now - *peer.lost > (directly ? kLastGoodbye : kLateGoodbye))
      return found(rank, " died or cannot be reached any more (" + peer.how + ")");
  }
}

}  // namespace pycollective
