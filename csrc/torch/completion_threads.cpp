#include "torch/completion_threads.h"

#include <pthread.h>
#include <unistd.h>

#include <condition_variable>
#include <csignal>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

namespace pycollective::shim {
namespace {

// Longer than a training step, so that a run does not create a thread a step.
constexpr std::chrono::seconds kIdleFor{5};

}  // namespace

struct CompletionThreads::State {
  const pid_t process = getpid();  // its threads, and whoever holds the mutex, live there alone
  std::mutex mutex;
  std::condition_variable posted;
  std::condition_variable ended;
  std::deque<std::function<void()>> tasks;
  int threads = 0;
  int idle = 0;
  bool closed = false;
};

namespace {
thread_local const void* served = nullptr;  // the State whose thread this is
}

CompletionThreads::CompletionThreads() : state_(std::make_shared<State>()) {}

CompletionThreads::~CompletionThreads() { close(std::chrono::milliseconds(0)); }

void CompletionThreads::post(std::function<void()> task) {
  if (state_->process != getpid()) return;
  {
    std::unique_lock lock(state_->mutex);
    const bool room = state_->threads < kMaxThreads && !state_->closed;
    const bool all_busy = state_->tasks.size() >= static_cast<std::size_t>(state_->idle);
    if (room && all_busy) {
      // Signals are the host program's: its own threads take them.
      sigset_t all;
      sigset_t before;
      sigfillset(&all);
      pthread_sigmask(SIG_SETMASK, &all, &before);
      try {
        std::thread(&CompletionThreads::run, state_).detach();
        ++state_->threads;
        ++state_->idle;  // until it takes its first task
      } catch (const std::system_error&) {
        // Out of threads: those that are here have to do.
      }
      pthread_sigmask(SIG_SETMASK, &before, nullptr);
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

void CompletionThreads::close(std::chrono::milliseconds limit) {
  if (state_->process != getpid()) return;
  std::unique_lock lock(state_->mutex);
  state_->closed = true;
  state_->posted.notify_all();
  const int own = served == state_.get() ? 1 : 0;
  state_->ended.wait_for(lock, limit, [&] { return state_->threads <= own; });
}

void CompletionThreads::run(const std::shared_ptr<State>& state) {
  pthread_setname_np(pthread_self(), "pycoll-future");
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
