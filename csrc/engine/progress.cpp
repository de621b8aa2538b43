#include "engine/progress.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <iterator>
#include <mutex>
#include <system_error>
#include <utility>
#include <vector>

#include "engine/communicator.h"
#include "library_thread.h"
#include "shared_memory/layout.h"

namespace pycollective {
namespace {

// Shorter than a caller's own wait: this thread's core is missing for computation.
constexpr std::chrono::microseconds kProgressYieldFor{100};
// The first sleep after carry_on() is no longer: what it was called for may not be seen at once
// (Communicator::end_call).
constexpr std::chrono::milliseconds kFirstSleep{1};
// With nothing pending there is nothing to look for; but no wait is unbounded.
constexpr std::chrono::seconds kIdleWait{60};

}  // namespace

struct Progress::State {
  std::shared_ptr<Node> node;
  std::mutex mutex;
  std::vector<std::shared_ptr<Communicator>> active;
  bool called = false;  // carry_on()
  std::atomic<bool> started{false};
  std::atomic<bool> stop{false};
  std::atomic<bool> asleep{false};  // the thread, or it is about to

  std::atomic<std::uint32_t>& doorbell() const { return node->own()->segment().header().doorbell; }
  // Unless the doorbell has rung since it was `seen`.
  void sleep(std::uint32_t seen, std::chrono::nanoseconds longest) {
    asleep = true;
    futex_wait(doorbell(), seen, longest);
    asleep = false;
  }
  // A system call only where the thread sleeps: it sets `asleep`, then looks at the doorbell; this
  // rings, then looks at `asleep`. Where none could be started, callers who wait drive.
  void wake() {
    doorbell().fetch_add(1);
    if (asleep || !started) futex_wake_all(doorbell());
  }
};

Progress::Progress(std::shared_ptr<Node> node) : state_(std::make_shared<State>()) {
  state_->node = std::move(node);
}

Progress::~Progress() {
  if (state_->node->forked()) {
    if (thread_.joinable()) thread_.detach();  // it runs in the parent
    return;
  }
  stop();
}

void Progress::stop() {
  if (state_->node->forked()) return;
  std::thread thread;
  std::vector<std::shared_ptr<Communicator>> left;  // released without the lock, as in run()
  {
    const std::lock_guard lock(state_->mutex);
    state_->stop = true;
    thread = std::move(thread_);
    left.swap(state_->active);
  }
  if (!thread.joinable()) return;
  state_->node->own()->wake();
  // The thread may hold the last communicator, and so be the one that ends here.
  if (thread.get_id() == std::this_thread::get_id())
    thread.detach();
  else
    thread.join();
}

bool Progress::runs() const { return state_->started && !state_->stop; }

bool Progress::awake() const { return runs() && !state_->asleep; }

void Progress::carry_on(const std::shared_ptr<Communicator>& communicator) {
  {
    const std::lock_guard lock(state_->mutex);
    if (state_->stop) return;  // waiting callers drive
    auto& active = state_->active;
    if (std::find(active.begin(), active.end(), communicator) == active.end())
      active.push_back(communicator);
    state_->called = true;
    if (!state_->started) {
      state_->started = true;
      try {
        thread_ = start_thread("pycollective", [state = state_] { run(state); });
      } catch (const std::system_error&) {
        // The system grants no thread: waiting callers drive, and the next call here tries again.
        state_->started = false;
      }
    }
  }
  state_->wake();
}

void Progress::run(const std::shared_ptr<State>& state) {
  std::vector<std::shared_ptr<Communicator>> active;
  std::vector<std::shared_ptr<Communicator>> done;
  Clock::time_point sleep_from{};
  Clock::time_point next_look{};
  bool called = false;
  for (;;) {
    // Without the lock: this may destroy a communicator, and with the last one this object.
    active.clear();
    const std::uint32_t seen = state->doorbell().load();
    {
      const std::lock_guard lock(state->mutex);
      if (state->stop) return;
      called |= std::exchange(state->called, false);
      // Another thread may drive a communicator; it calls carry_on() when it stops.
      auto& all = state->active;
      const auto rest = std::stable_partition(
          all.begin(), all.end(), [](const auto& each) { return each->needs_driving(); });
      active.assign(all.begin(), rest);
      done.assign(std::make_move_iterator(rest), std::make_move_iterator(all.end()));
      all.erase(rest, all.end());
    }
    done.clear();  // now, rather than after a long sleep
    if (active.empty()) {
      state->sleep(seen, kIdleWait);
      sleep_from = {};
      continue;
    }
    const Clock::time_point now = Clock::now();
    const bool sleepy = sleep_from != Clock::time_point{} && now >= sleep_from;
    if (sleepy)
      for (const auto& each : active) each->announce_sleep();
    // Also if one communicator always has work: another may wait for a dead peer.
    const bool look = sleepy || now >= next_look;
    if (look) next_look = now + kLookEvery;
    bool progressed = false;
    for (const auto& each : active)
      progressed |= each->poll(look) == pycollective::State::kProgressed;
    if (progressed) {
      sleep_from = {};
    } else if (sleepy) {
      std::chrono::nanoseconds longest = kLookEvery;
      if (std::exchange(called, false)) longest = kFirstSleep;
      for (const auto& each : active) longest = std::min(longest, each->longest_sleep());
      state->sleep(seen, longest);
    } else {
      if (sleep_from == Clock::time_point{}) sleep_from = now + kProgressYieldFor;
      sched_yield();
    }
  }
}

}  // namespace pycollective
