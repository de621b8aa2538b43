#include "torch/gloo_link.h"

#include <ATen/ops/from_blob.h>
#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <deque>
#include <map>
#include <mutex>
#include <new>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/waiting_time.h"
#include "per_process.h"

namespace pycollective::shim {
namespace {

constexpr std::chrono::milliseconds kForever = std::chrono::hours(24 * 365);
constexpr std::chrono::milliseconds kThreadsEndWithin{500};
// How long a lane waits for a free thread when none can be started.
constexpr double kWithoutThread = 1;  // seconds

// pycollective/system_limits.py has the same words for the threads of Python code.
std::system_error no_thread() {
  return {std::make_error_code(std::errc::resource_unavailable_try_again),
          "no thread could be started, which messages between hosts need: raise the limit of "
          "processes and threads (ulimit -u, or pids.max of the cgroup)"};
}

// The sentence that says what happened, without Gloo's source line and advice.
std::string in_words(const std::string& what) {
  const std::size_t place = what.empty() || what[0] != '[' ? std::string::npos : what.find("] ");
  const std::string rest = place == std::string::npos ? what : what.substr(place + 2);
  return rest.substr(0, std::min({rest.find(". "), rest.find('\n'), std::size_t{200}}));
}

}  // namespace

struct GlooLink::State : std::enable_shared_from_this<GlooLink::State> {
  struct Entry {
    Link::Transfer transfer = 0;
    c10::intrusive_ptr<c10d::Work> work;
    bool cancelled = false;
  };

  struct Lane {
    int rank = 0;
    bool served = false;  // by a thread
    std::deque<Entry> entries;
  };

  ForkGuard guard;  // a fork has neither these threads nor the holder of the mutex
  c10::intrusive_ptr<c10d::Backend> group;
  std::mutex mutex;
  std::condition_variable ready_or_closed;
  std::condition_variable thread_ended;
  std::map<std::tuple<int, int, bool>, Lane> lanes;  // rank, number, whether it receives
  std::deque<Lane*> ready;                           // not empty, and not served
  std::unordered_map<Transfer, Lane*> unserved;      // sends whose end nobody has asked for
  std::unordered_map<Transfer, Outcome> ended;
  std::deque<Loss> losses;
  std::function<void()> bell;
  int threads = 0;
  int idle = 0;
  std::optional<WaitingTime> without_thread;  // lanes are ready, and no thread takes one
  bool closed = false;
  Transfer next = 1;

  bool forked() const { return guard.forked(); }
  // The caller of these holds the mutex; begin() takes it.
  Transfer begin(int rank, int lane, bool receives, void* data, std::size_t bytes, bool awaited);
  void serve(Lane& lane);
  void start_thread();
  void wait_for_first(Lane& lane, std::unique_lock<std::mutex>& lock);
  static void run(const std::shared_ptr<State>& state);
};

Link::Transfer GlooLink::State::begin(int rank, int number, bool receives, void* data,
                                      std::size_t bytes, bool awaited) {
  if (forked()) throw std::runtime_error("this process is a fork of the one that joined");
  const std::lock_guard lock(mutex);
  if (closed) throw std::runtime_error("the transport is closed");
  static std::byte nothing;
  std::vector<at::Tensor> tensors = {at::from_blob(data != nullptr ? data : &nothing,
                                                   {static_cast<std::int64_t>(bytes)}, at::kByte)};
  // Checked before Gloo has the memory: later nobody could be told. A message that nobody awaits
  // goes without a thread: it may be the one that tells the other ranks.
  if (threads == 0) start_thread();
  if (threads == 0 && awaited) throw no_thread();
  const Transfer transfer = next++;
  c10::intrusive_ptr<c10d::Work> work;
  try {
    work = !receives          ? group->send(tensors, rank, number)
           : rank == kAnyRank ? group->recvAnysource(tensors, number)
                              : group->recv(tensors, rank, number);
  } catch (const std::bad_alloc&) {
    throw;  // not the peer's fault
  } catch (const std::exception& error) {
    if (rank == kAnyRank) throw;
    losses.push_back({rank, in_words(error.what())});
    ended[transfer] = Outcome::kLost;
    return transfer;
  }
  Lane& lane = lanes[{rank, number, receives}];
  lane.rank = rank;
  lane.entries.push_back({transfer, std::move(work), false});
  if (awaited || lane.served)
    serve(lane);
  else
    unserved[transfer] = &lane;
  return transfer;
}

void GlooLink::State::serve(Lane& lane) {
  for (const Entry& each : lane.entries) unserved.erase(each.transfer);
  if (lane.served || lane.entries.empty()) return;
  lane.served = true;
  ready.push_back(&lane);
  if (static_cast<std::size_t>(idle) < ready.size()) start_thread();
  ready_or_closed.notify_one();
}

void GlooLink::State::start_thread() {
  // The host program's own threads take its signals.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    std::thread(&State::run, shared_from_this()).detach();
    ++threads;
    ++idle;  // until it takes its first lane
  } catch (const std::system_error&) {
    // The lane waits for a free thread, or for one that can be started later.
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void GlooLink::State::run(const std::shared_ptr<State>& state) {
  pthread_setname_np(pthread_self(), "pycoll-far");
  std::unique_lock lock(state->mutex);
  for (;;) {
    // A plain wait() needs a newer libstdc++ than RHEL 9 has (GLIBCXX_3.4.30).
    const auto wanted = [&] { return !state->ready.empty() || state->closed; };
    while (!state->ready_or_closed.wait_for(lock, kForever, wanted)) {
    }
    if (state->ready.empty()) break;
    Lane& lane = *state->ready.front();
    state->ready.pop_front();
    state->without_thread.reset();
    --state->idle;
    while (!lane.entries.empty()) state->wait_for_first(lane, lock);
    lane.served = false;
    ++state->idle;
  }
  --state->idle;
  --state->threads;
  state->thread_ended.notify_all();
}

void GlooLink::State::wait_for_first(Lane& lane, std::unique_lock<std::mutex>& lock) {
  bool completed = false;
  std::string error = "the message was given up";
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
  Entry entry = std::move(lane.entries.front());
  lane.entries.pop_front();
  if (completed) {
    ended[entry.transfer] = Outcome::kDone;
  } else {
    // Destroying the work gives the memory back; it may wait for Gloo, which may be writing there.
    lock.unlock();
    entry.work.reset();
    lock.lock();
    ended[entry.transfer] = entry.cancelled ? Outcome::kCancelled : Outcome::kLost;
    if (!entry.cancelled && lane.rank != kAnyRank) losses.push_back({lane.rank, std::move(error)});
  }
  const std::function<void()> ring = closed ? nullptr : bell;
  lock.unlock();
  if (ring) ring();
  entry.work.reset();
  lock.lock();
}

GlooLink::GlooLink(c10::intrusive_ptr<c10d::Backend> group) : state_(std::make_shared<State>()) {
  state_->group = std::move(group);
}

GlooLink::~GlooLink() {
  if (!state_->forked()) {
    close(true);
    return;
  }
  // A fork has neither these threads nor Gloo's; joining them would never end. Leak them.
  static_cast<void>(new std::shared_ptr<State>(std::move(state_)));
}

Link::Transfer GlooLink::send(int rank, int lane, const void* data, std::size_t bytes,
                              bool awaited) {
  return state_->begin(rank, lane, false, const_cast<void*>(data), bytes, awaited);
}

Link::Transfer GlooLink::receive(int rank, int lane, void* data, std::size_t capacity) {
  return state_->begin(rank, lane, true, data, capacity, true);
}

void GlooLink::progress() {
  if (state_->forked()) return;
  const std::lock_guard lock(state_->mutex);
  std::optional<WaitingTime>& waiting = state_->without_thread;
  const auto is_short = [&] {
    return static_cast<std::size_t>(state_->idle) < state_->ready.size();
  };
  if (is_short()) state_->start_thread();
  if (!is_short()) return waiting.reset();
  if (!waiting) waiting.emplace(kWithoutThread);
  if (!waiting->is_over(Clock::now())) return;
  waiting.reset();
  throw no_thread();
}

Link::Outcome GlooLink::test(Transfer transfer) {
  if (state_->forked()) return Outcome::kUnderWay;
  const std::lock_guard lock(state_->mutex);
  const auto ended = state_->ended.find(transfer);
  if (ended != state_->ended.end()) {
    const Outcome outcome = ended->second;
    state_->ended.erase(ended);
    return outcome;
  }
  const auto unserved = state_->unserved.find(transfer);
  if (unserved != state_->unserved.end()) state_->serve(*unserved->second);
  return Outcome::kUnderWay;
}

void GlooLink::cancel(Transfer transfer) noexcept {
  if (state_->forked()) return;
  const std::lock_guard lock(state_->mutex);
  for (auto& [key, lane] : state_->lanes)
    for (State::Entry& entry : lane.entries) {
      if (entry.transfer != transfer) continue;
      entry.cancelled = true;
      try {
        entry.work->abort();
        state_->serve(lane);
      } catch (const std::exception&) {
        // It has ended, or there is no thread to see its end.
      }
      return;
    }
}

std::optional<Link::Loss> GlooLink::lost() {
  if (state_->forked()) return std::nullopt;
  const std::lock_guard lock(state_->mutex);
  if (state_->losses.empty()) return std::nullopt;
  Loss loss = std::move(state_->losses.front());
  state_->losses.pop_front();
  return loss;
}

bool GlooLink::ring_with(std::function<void()> bell) {
  if (state_->forked()) return true;
  const std::lock_guard lock(state_->mutex);
  state_->bell = std::move(bell);
  return true;
}

void GlooLink::close(bool) noexcept {
  if (state_->forked()) return;
  c10::intrusive_ptr<c10d::Backend> group;  // destroyed without the lock
  std::unique_lock lock(state_->mutex);
  if (std::exchange(state_->closed, true)) return;
  state_->bell = nullptr;
  state_->ready_or_closed.notify_all();
  if (state_->thread_ended.wait_for(lock, kThreadsEndWithin, [&] { return state_->threads == 0; }))
    group = std::move(state_->group);
  lock.unlock();
}

}  // namespace pycollective::shim
