#include "torch/completion_threads.h"

#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "bindings/gil.h"
#include "library_thread.h"
#include "per_process.h"
#include "torch/errors.h"

namespace pycollective::shim {
namespace {

// Longer than a training step: so a run does not create a thread a step.
constexpr std::chrono::seconds kIdleFor{5};
// How long close() waits before it says so.
constexpr std::chrono::seconds kWarnAfter{5};

}  // namespace

struct CompletionThreads::State {
  ForkGuard guard;  // a fork has neither these threads nor the holder of the mutex
  int rank = 0;
  std::chrono::milliseconds limit{0};
  std::atomic<int> calls{0};
  std::mutex mutex;
  std::condition_variable posted;
  std::condition_variable ended;
  std::deque<std::function<void()>> tasks;
  int threads = 0;
  int idle = 0;
  bool closed = false;

  // All objects of this process. The caller holds the GIL.
  static std::vector<std::weak_ptr<State>>& all() {
    static PerProcess<std::vector<std::weak_ptr<State>>> states;
    return *states;
  }
  static std::vector<std::shared_ptr<State>> living() {
    std::vector<std::shared_ptr<State>> found;
    for (const auto& each : all())
      if (std::shared_ptr<State> state = each.lock()) found.push_back(std::move(state));
    return found;
  }
};

namespace {
thread_local const void* served = nullptr;  // the State whose thread this is
}

CompletionThreads::CompletionThreads(int rank, std::chrono::milliseconds limit)
    : state_(std::make_shared<State>()), calls_(&state_->calls) {
  state_->rank = rank;
  state_->limit = limit;
  auto& all = State::all();
  all.erase(std::remove_if(all.begin(), all.end(), [](const auto& it) { return it.expired(); }),
            all.end());
  all.push_back(state_);
}

CompletionThreads::~CompletionThreads() { close(std::chrono::milliseconds(0)); }

void CompletionThreads::post(std::function<void()> task) {
  if (state_->guard.forked()) return;
  if (other_threads_stop()) {
    new std::function<void()>(std::move(task));
    return;
  }
  {
    std::unique_lock lock(state_->mutex);
    const bool room = state_->threads < kMaxThreads;
    const bool all_busy = state_->tasks.size() >= static_cast<std::size_t>(state_->idle);
    if (room && all_busy) {
      try {
        start_thread("pycoll-future", [state = state_] { run(state); }).detach();
        ++state_->threads;
        ++state_->idle;  // until it takes its first task
      } catch (const std::system_error&) {
        // No thread to be had: the existing ones take it.
      }
    }
    if (state_->threads > 0) {
      state_->tasks.push_back(std::move(task));
      lock.unlock();
      state_->posted.notify_one();
      return;
    }
  }
  task();
}

void CompletionThreads::close(std::chrono::milliseconds limit) { close(*state_, limit); }

void CompletionThreads::close(State& state, std::chrono::milliseconds limit) {
  if (state.guard.forked()) return;
  std::unique_lock lock(state.mutex);
  state.closed = true;
  state.posted.notify_all();
  const int own = served == &state ? 1 : 0;
  const auto ended = [&] { return state.threads <= own; };
  const auto first = std::min<std::chrono::milliseconds>(limit, kWarnAfter);
  if (state.ended.wait_for(lock, first, ended) || limit <= first) return;
  const std::string text = "pycollective: rank " + std::to_string(state.rank) +
                           " waits for callbacks of its futures (then, add_done_callback) that "
                           "still run; it gives up after " +
                           std::to_string(limit.count() / 1000) + " s\n";
  // One write: so lines of several ranks do not mix. A lost warning is no error.
  [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, text.data(), text.size());
  state.ended.wait_for(lock, limit - first, ended);
}

bool CompletionThreads::any_busy() {
  const auto states = State::living();
  return std::any_of(states.begin(), states.end(), [](const auto& state) {
    const std::lock_guard lock(state->mutex);
    return state->calls > 0 || !state->tasks.empty() || state->threads > state->idle;
  });
}

void CompletionThreads::end_all() {
  const auto states = State::living();
  const GilReleased unlocked;  // which the callbacks may need
  for (const auto& state : states) close(*state, state->limit);
}

void CompletionThreads::run(const std::shared_ptr<State>& state) {
  served = state.get();
  std::unique_lock lock(state->mutex);
  for (;;) {
    const bool in_time = state->posted.wait_for(
        lock, kIdleFor, [&] { return !state->tasks.empty() || state->closed; });
    if (state->tasks.empty()) {
      if (!in_time || state->closed) break;
      continue;
    }
    --state->idle;
    {
      const std::function<void()> task = std::move(state->tasks.front());
      state->tasks.pop_front();
      lock.unlock();
      task();
    }
    lock.lock();
    ++state->idle;
  }
  --state->idle;
  --state->threads;
  state->ended.notify_all();
}

}  // namespace pycollective::shim
