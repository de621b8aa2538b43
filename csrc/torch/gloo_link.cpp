#include "torch/gloo_link.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <new>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/waiting_time.h"
#include "library_thread.h"
#include "per_process.h"

namespace pycollective::shim {
namespace {

using StoreClock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kFirstPoll{1};
constexpr std::chrono::milliseconds kShortestPoll{20};
constexpr int kPollsInASecond = 20'000;  // of all ranks together; bootstrap/rendezvous.py says why
// transport/gloo.py names 32 ranks, and says that there are more from one more on.
constexpr std::size_t kMostAbsent = 33;

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

std::string here(int rank) { return "here/" + std::to_string(rank); }

// A store whose waits poll: they end when the caller gives up, and others may use it meanwhile.
class PollingStore final : public c10d::Store {
 public:
  PollingStore(c10::intrusive_ptr<c10d::Store> store, int ranks,
               std::shared_ptr<const std::atomic<bool>> given_up)
      : store_(std::move(store)), ranks_(ranks), given_up_(std::move(given_up)) {}

  // Torch's stores have a lock of their own.
  c10::intrusive_ptr<c10d::Store> clone() override {
    return c10::make_intrusive<PollingStore>(store_, ranks_, given_up_);
  }
  void set(const std::string& key, const std::vector<std::uint8_t>& value) override {
    check_wanted();
    store_->set(key, value);
  }
  std::vector<std::uint8_t> get(const std::string& key) override {
    wait({key});
    return store_->get(key);
  }
  std::int64_t add(const std::string& key, std::int64_t value) override {
    check_wanted();
    return store_->add(key, value);
  }
  bool deleteKey(const std::string& key) override { return store_->deleteKey(key); }
  bool check(const std::vector<std::string>& keys) override {
    check_wanted();
    return store_->check(keys);
  }
  std::int64_t getNumKeys() override { return store_->getNumKeys(); }
  void wait(const std::vector<std::string>& keys) override { wait(keys, getTimeout()); }
  void wait(const std::vector<std::string>& keys,
            const std::chrono::milliseconds& timeout) override {
    const auto end = StoreClock::now() + timeout;
    const std::chrono::milliseconds longest =
        std::max(kShortestPoll, std::chrono::milliseconds(1000LL * ranks_ / kPollsInASecond));
    for (std::chrono::milliseconds pause = kFirstPoll; !check(keys);
         pause = std::min(2 * pause, longest)) {
      if (StoreClock::now() >= end)
        throw std::runtime_error("the others' addresses were not there in time");
      std::this_thread::sleep_for(pause);
    }
  }
  void append(const std::string& key, const std::vector<std::uint8_t>& value) override {
    check_wanted();
    store_->append(key, value);
  }
  std::vector<std::vector<std::uint8_t>> multiGet(const std::vector<std::string>& keys) override {
    wait(keys);
    return store_->multiGet(keys);
  }
  void multiSet(const std::vector<std::string>& keys,
                const std::vector<std::vector<std::uint8_t>>& values) override {
    check_wanted();
    store_->multiSet(keys, values);
  }
  bool hasExtendedApi() const override { return store_->hasExtendedApi(); }

 private:
  void check_wanted() const {
    if (*given_up_) throw std::runtime_error("this rank gave it up");
  }

  const c10::intrusive_ptr<c10d::Store> store_;
  const int ranks_;
  const std::shared_ptr<const std::atomic<bool>> given_up_;
};

}  // namespace

struct ConnectThread::State {
  mutable std::mutex mutex;
  mutable std::condition_variable has_ended;
  bool ended = false;
  std::exception_ptr error;
  c10::intrusive_ptr<c10d::Store> store;
  c10::intrusive_ptr<c10d::Backend> group;
  std::vector<int> absent;
  const std::shared_ptr<std::atomic<bool>> given_up = std::make_shared<std::atomic<bool>>(false);
};

std::unique_ptr<ConnectThread> ConnectThread::begin(const std::shared_ptr<State>& state,
                                                    std::function<void()> act) {
  std::unique_ptr<ConnectThread> made(new ConnectThread(state));
  start_thread("pycoll-connect", [state, act = std::move(act)] {
    std::exception_ptr error;
    try {
      act();
    } catch (const std::exception&) {
      error = std::current_exception();
    }
    const std::lock_guard lock(state->mutex);
    state->error = error;
    state->ended = true;
    state->has_ended.notify_all();
  }).detach();
  return made;
}

std::unique_ptr<ConnectThread> ConnectThread::to_store(std::string host, std::uint16_t port,
                                                       std::chrono::milliseconds timeout) {
  const auto state = std::make_shared<State>();
  return begin(state, [&state = *state, host = std::move(host), port, timeout] {
    c10d::TCPStoreOptions options;
    options.port = port;
    options.waitWorkers = false;
    options.timeout = timeout;
    state.store = c10::make_intrusive<c10d::TCPStore>(host, options);
  });
}

std::unique_ptr<ConnectThread> ConnectThread::to_ranks(c10::intrusive_ptr<c10d::Backend> alone,
                                                       c10::intrusive_ptr<c10d::Store> store,
                                                       int rank, int size) {
  const auto state = std::make_shared<State>();
  return begin(
      state, [&state = *state, alone = std::move(alone), store = std::move(store), rank, size] {
        const auto polling = c10::make_intrusive<PollingStore>(store, size, state.given_up);
        const auto options = alone->getBackendOptions();
        polling->setTimeout(options->timeout);
        try {
          polling->set(here(rank), std::vector<std::uint8_t>{});
          state.group = alone->merge(polling, options, rank, size);
        } catch (const std::exception&) {
          const std::exception_ptr failed = std::current_exception();
          try {
            for (int each = 0; each < size && state.absent.size() < kMostAbsent; ++each)
              if (!polling->check({here(each)})) state.absent.push_back(each);
          } catch (const std::exception&) {
            // The store has gone, or nobody asks any more.
          }
          std::rethrow_exception(failed);
        }
      });
}

bool ConnectThread::wait(std::chrono::milliseconds limit) const {
  std::unique_lock lock(state_->mutex);
  return state_->has_ended.wait_for(lock, limit, [&] { return state_->ended; });
}

void ConnectThread::give_up() noexcept { *state_->given_up = true; }

c10::intrusive_ptr<c10d::Store> ConnectThread::store() const {
  if (state_->error) std::rethrow_exception(state_->error);
  return state_->store;
}

c10::intrusive_ptr<c10d::Backend> ConnectThread::take_group() {
  if (state_->error) std::rethrow_exception(state_->error);
  return std::move(state_->group);
}

const std::vector<int>& ConnectThread::absent() const { return state_->absent; }

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
  std::function<void()> wake;
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
  try {
    pycollective::start_thread("pycoll-far", [state = shared_from_this()] { run(state); }).detach();
    ++threads;
    ++idle;  // until it takes its first lane
  } catch (const std::system_error&) {
    // The lane waits for a free thread, or for one that can be started later.
  }
}

void GlooLink::State::run(const std::shared_ptr<State>& state) {
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
  const std::function<void()> to_call = closed ? nullptr : wake;
  lock.unlock();
  if (to_call) to_call();
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

bool GlooLink::wake_with(std::function<void()> wake) {
  if (state_->forked()) return true;
  const std::lock_guard lock(state_->mutex);
  state_->wake = std::move(wake);
  return true;
}

void GlooLink::close(bool) noexcept {
  if (state_->forked()) return;
  c10::intrusive_ptr<c10d::Backend> group;  // destroyed without the lock
  std::unique_lock lock(state_->mutex);
  if (std::exchange(state_->closed, true)) return;
  state_->wake = nullptr;
  state_->ready_or_closed.notify_all();
  if (state_->thread_ended.wait_for(lock, kThreadsEndWithin, [&] { return state_->threads == 0; }))
    group = std::move(state_->group);
  lock.unlock();
}

}  // namespace pycollective::shim
