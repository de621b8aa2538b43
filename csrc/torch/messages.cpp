#include "torch/messages.h"

#include <ATen/ops/from_blob.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <utility>

#include "engine/api.h"

namespace pycollective::shim {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kNoticeBytes = 1024;
// Who waits is ended by others: by a message, a closed connection, or an abort.
constexpr std::chrono::milliseconds kForever = std::chrono::hours(24 * 365);
constexpr std::chrono::milliseconds kGiveUpWithin{500};
// Of a failure a peer may have heard from others, and then it takes no more notices.
constexpr std::chrono::milliseconds kToldWithin{50};
// The last messages of a peer that has left may still be on their way to whoever waits for them.
constexpr std::chrono::milliseconds kLastMessages{100};
constexpr int kGoodbye = static_cast<int>(FailureKind::kNone);  // a notice without a failure

using NoticeBuffer = std::array<char, kNoticeBytes>;

struct Entry {
  Messages::Ticket ticket = 0;
  c10::intrusive_ptr<c10d::Work> work;
  std::shared_ptr<NoticeBuffer> notice;  // the memory, of a notice
  bool given_up = false;
};

struct Lane {
  int rank = 0;
  int tag = 0;
  bool receives = false;
  bool served = false;  // by a thread
  std::deque<Entry> entries;
};

bool is_notice(const Lane& lane) { return lane.tag == kTagNotice; }

// The sentence that tells what happened: not where in Gloo's sources, nor its advice.
std::string in_words(const std::string& what) {
  const std::size_t place = what.empty() || what[0] != '[' ? std::string::npos : what.find("] ");
  const std::string rest = place == std::string::npos ? what : what.substr(place + 2);
  return rest.substr(0, std::min({rest.find(". "), rest.find('\n'), std::size_t{200}}));
}

}  // namespace

struct Messages::State : std::enable_shared_from_this<Messages::State> {
  const pid_t process = getpid();  // its threads, and whoever holds the mutex, live there alone
  c10::intrusive_ptr<c10d::Backend> group;
  std::vector<int> far;
  std::mutex mutex;
  std::condition_variable changed;  // an entry or a thread has ended
  std::condition_variable ready_or_closed;
  std::map<std::tuple<int, int, bool>, Lane> lanes;
  std::deque<Lane*> ready;  // not empty, and not served
  Bell bell;
  int threads = 0;
  int idle = 0;
  bool closing = false;  // nothing new
  bool closed = false;   // threads end
  Ticket next = 1;
  std::vector<Ticket> done;
  std::vector<Notice> notices;
  std::map<int, std::string> lost;        // by rank: how its connection ended
  std::map<int, Clock::time_point> left;  // by rank: when it said goodbye
  std::set<int> wanted;                   // lost ranks that a message was to go to or come from
  bool told_of_lost = false;
  bool failed = false;  // has told, or heard, of a failure

  bool forked() const { return process != getpid(); }
  Ticket open_begin(int rank, int tag, bool receives, void* data, std::size_t bytes) {
    if (forked()) throw std::runtime_error("this process is a fork of the one that joined");
    const std::lock_guard lock(mutex);
    if (closing) throw std::runtime_error("the transport is closed");
    return begin(rank, tag, receives, data, bytes);
  }

  // With the lock held, all of these.
  Ticket begin(int rank, int tag, bool receives, void* data, std::size_t bytes,
               std::shared_ptr<NoticeBuffer> notice = nullptr);
  void finish(Lane& lane, const Entry& entry, bool completed, const std::string& error);
  void hear(int rank, const NoticeBuffer& notice);
  void say(int kind, const std::string& report);
  void await_notice(int rank);
  void look_for_lost();
  void end(const std::set<Ticket>& tickets, std::unique_lock<std::mutex>& lock);
  void start_thread();
  void wait_for_first(Lane& lane, std::unique_lock<std::mutex>& lock);
  static void run(const std::shared_ptr<State>& state);
  template <class Which>
  bool any_entry(const Which& which) const {
    return std::any_of(lanes.begin(), lanes.end(), [&](const auto& each) {
      return !each.second.entries.empty() && which(each.second);
    });
  }
};

Messages::Ticket Messages::State::begin(int rank, int tag, bool receives, void* data,
                                        std::size_t bytes, std::shared_ptr<NoticeBuffer> notice) {
  static std::byte nothing;
  std::vector<at::Tensor> tensors = {at::from_blob(data != nullptr ? data : &nothing,
                                                   {static_cast<std::int64_t>(bytes)}, at::kByte)};
  const Ticket ticket = next++;
  c10::intrusive_ptr<c10d::Work> work;
  try {
    work = receives ? group->recv(tensors, rank, tag) : group->send(tensors, rank, tag);
  } catch (const std::exception& error) {
    lost.emplace(rank, in_words(error.what()));
    if (tag != kTagNotice) wanted.insert(rank);
    return ticket;  // never done: `look_for_lost` ends the operation
  }
  Lane& lane = lanes[{rank, tag, receives}];
  lane.rank = rank;
  lane.tag = tag;
  lane.receives = receives;
  lane.entries.push_back({ticket, std::move(work), std::move(notice), false});
  if (!lane.served) {
    lane.served = true;
    ready.push_back(&lane);
    if (static_cast<std::size_t>(idle) < ready.size()) start_thread();
    ready_or_closed.notify_one();
  }
  return ticket;
}

void Messages::State::finish(Lane& lane, const Entry& entry, bool completed,
                             const std::string& error) {
  if (entry.given_up) return;
  if (!completed) {
    lost.emplace(lane.rank, error.empty() ? "the message was given up" : error);
    if (!is_notice(lane)) wanted.insert(lane.rank);
  } else if (!is_notice(lane)) {
    done.push_back(entry.ticket);
  } else if (lane.receives) {
    hear(lane.rank, *entry.notice);
  }
}

void Messages::State::hear(int rank, const NoticeBuffer& notice) {
  const int kind = notice[0];
  if (kind == kGoodbye) {
    left.emplace(rank, Clock::now());
    return;
  }
  failed = true;
  notices.emplace_back(kind, rank, std::string(&notice[1], strnlen(&notice[1], kNoticeBytes - 1)));
  if (!closing) await_notice(rank);
}

void Messages::State::await_notice(int rank) {
  const auto notice = std::make_shared<NoticeBuffer>();
  begin(rank, kTagNotice, true, notice->data(), kNoticeBytes, notice);
}

void Messages::State::say(int kind, const std::string& report) {
  const auto notice = std::make_shared<NoticeBuffer>();
  notice->fill('\0');
  (*notice)[0] = static_cast<char>(kind);
  std::memcpy(&(*notice)[1], report.data(), std::min(report.size(), kNoticeBytes - 2));
  for (const int rank : far)
    if (left.count(rank) == 0 && lost.count(rank) == 0)
      begin(rank, kTagNotice, false, notice->data(), kNoticeBytes, notice);
}

// A peer that has gone matters once somebody needs it.
void Messages::State::look_for_lost() {
  if (told_of_lost) return;
  const auto tell_of = [&](int rank, const std::string& how) {
    const std::string seen = std::to_string(group->getRank());
    told_of_lost = true;
    notices.emplace_back(static_cast<int>(FailureKind::kPeerFailure), group->getRank(),
                         "rank " + std::to_string(rank) + how + ", seen by rank " + seen +
                             ". The communicator does no more work; the output of rank " +
                             std::to_string(rank) +
                             " tells why, and the job must be started again");
  };
  const auto is_data = [](const Lane& lane) { return !is_notice(lane); };
  for (const auto& [rank, since] : left) {
    const auto with_it = [&, peer = rank](const Lane& lane) {
      return is_data(lane) && lane.rank == peer;
    };
    if (wanted.count(rank) != 0 || (Clock::now() - since > kLastMessages && any_entry(with_it)))
      return tell_of(rank, " closed its communicator before it finished its part");
  }
  for (const auto& [rank, how] : lost)
    if (left.count(rank) == 0 && (wanted.count(rank) != 0 || any_entry(is_data)))
      return tell_of(rank, " died or cannot be reached any more (" + how + ")");
}

// Their memory is the caller's again, unless Gloo does not let go of it in time.
void Messages::State::end(const std::set<Ticket>& tickets, std::unique_lock<std::mutex>& lock) {
  for (auto& [key, lane] : lanes)
    for (Entry& entry : lane.entries)
      if (!entry.given_up && tickets.count(entry.ticket) != 0) {
        entry.given_up = true;
        try {
          entry.work->abort();
        } catch (const std::exception&) {
          // It has ended by itself.
        }
      }
  changed.wait_for(lock, kGiveUpWithin, [&] {
    return !any_entry([&](const Lane& lane) {
      return std::any_of(lane.entries.begin(), lane.entries.end(),
                         [&](const Entry& entry) { return tickets.count(entry.ticket) != 0; });
    });
  });
}

void Messages::State::start_thread() {
  // Signals are the host program's: its own threads take them.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    std::thread(&State::run, shared_from_this()).detach();
    ++threads;
    ++idle;  // until it takes its first lane
  } catch (const std::system_error&) {
    // The lane waits for a thread that there is; if none comes free, until the timeout.
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (threads == 0) throw std::runtime_error("no thread can be started");
}

void Messages::State::run(const std::shared_ptr<State>& state) {
  pthread_setname_np(pthread_self(), "pycoll-far");
  std::unique_lock lock(state->mutex);
  for (;;) {
    state->ready_or_closed.wait(lock, [&] { return !state->ready.empty() || state->closed; });
    if (state->ready.empty()) break;
    Lane& lane = *state->ready.front();
    state->ready.pop_front();
    --state->idle;
    while (!lane.entries.empty()) state->wait_for_first(lane, lock);
    lane.served = false;
    ++state->idle;
  }
  --state->idle;
  --state->threads;
  state->changed.notify_all();
}

void Messages::State::wait_for_first(Lane& lane, std::unique_lock<std::mutex>& lock) {
  bool completed = false;
  std::string error;
  {
    const c10::intrusive_ptr<c10d::Work> work = lane.entries.front().work;
    lock.unlock();
    try {
      completed = work->wait(kForever);
    } catch (const std::exception& failed) {
      error = in_words(failed.what());
    }
    lock.lock();
  }
  {
    Entry entry = std::move(lane.entries.front());
    lane.entries.pop_front();
    finish(lane, entry, completed, error);
    // Its end lets go of the memory, and may wait for Gloo, which may be writing there.
    const Bell ring = bell;
    lock.unlock();
    entry = {};
    if (ring) ring();
  }
  lock.lock();
  changed.notify_all();
}

Messages::Messages(c10::intrusive_ptr<c10d::Backend> group, std::vector<int> far)
    : state_(std::make_shared<State>()) {
  state_->group = std::move(group);
  state_->far = std::move(far);
  const std::lock_guard lock(state_->mutex);
  for (const int rank : state_->far) state_->await_notice(rank);
}

Messages::~Messages() {
  if (!state_->forked()) {
    close();
    return;
  }
  // Neither its threads nor Gloo's are here: what would end them would wait for ever.
  static_cast<void>(new std::shared_ptr<State>(std::move(state_)));
}

Messages::Ticket Messages::isend(int rank, int tag, const void* data, std::size_t bytes) {
  return state_->open_begin(rank, tag, false, const_cast<void*>(data), bytes);
}

Messages::Ticket Messages::irecv(int rank, int tag, void* data, std::size_t bytes) {
  return state_->open_begin(rank, tag, true, data, bytes);
}

std::optional<Messages::News> Messages::poll() {
  if (state_->forked()) return std::nullopt;
  const std::lock_guard lock(state_->mutex);
  if (!state_->closing) state_->look_for_lost();
  if (state_->done.empty() && state_->notices.empty()) return std::nullopt;
  return News(std::exchange(state_->done, {}), std::exchange(state_->notices, {}));
}

void Messages::give_up(const std::vector<Ticket>& tickets) {
  if (state_->forked()) return;
  std::unique_lock lock(state_->mutex);
  state_->end({tickets.begin(), tickets.end()}, lock);
}

void Messages::ring_with(Bell bell) {
  const std::lock_guard lock(state_->mutex);
  state_->bell = std::move(bell);
}

void Messages::tell(int kind, const std::string& report) {
  if (state_->forked()) return;
  const std::lock_guard lock(state_->mutex);
  state_->failed = true;
  if (!state_->closing) state_->say(kind, report);
}

void Messages::close() {
  if (state_->forked()) return;
  c10::intrusive_ptr<c10d::Backend> group;
  std::unique_lock lock(state_->mutex);
  if (std::exchange(state_->closing, true)) return;
  // After a failure nobody listens for it any more.
  if (!state_->failed) state_->say(kGoodbye, "");
  const auto notices_sent = [&] {
    return !state_->any_entry([](const Lane& lane) { return is_notice(lane) && !lane.receives; });
  };
  state_->changed.wait_for(lock, state_->failed ? kToldWithin : kGiveUpWithin, notices_sent);
  std::set<Ticket> open;
  for (const auto& [key, lane] : state_->lanes)
    for (const Entry& entry : lane.entries) open.insert(entry.ticket);
  state_->end(open, lock);
  state_->closed = true;
  state_->ready_or_closed.notify_all();
  if (state_->changed.wait_for(lock, kGiveUpWithin, [&] { return state_->threads == 0; }))
    group = std::move(state_->group);  // ends out of the lock
  state_->bell = nullptr;
  lock.unlock();
}

}  // namespace pycollective::shim
