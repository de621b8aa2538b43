#include "torch/connect_thread.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <csignal>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>

namespace pycollective::shim {
namespace {

using StoreClock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kFirstPoll{1};
constexpr std::chrono::milliseconds kShortestPoll{20};
constexpr int kPollsInASecond = 20'000;  // of all ranks together; bootstrap/rendezvous.py says why
// transport/gloo.py names 32 ranks, and says that there are more from one more on.
constexpr std::size_t kMostAbsent = 33;

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
  // Signals are the host program's: its own threads take them.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    std::thread([state, act = std::move(act)] {
      pthread_setname_np(pthread_self(), "pycoll-connect");
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
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
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

}  // namespace pycollective::shim
