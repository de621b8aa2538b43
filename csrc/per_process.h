// What a process has one of.
#pragma once

#include <atomic>
#include <memory>

#include "fork_guard.h"

namespace pycollective {

// Made when it is first asked for, and never destroyed, as what ends after all else may ask for it.
// A fork has one of its own: the parent's may have been locked, or half changed, by a thread that
// the fork does not have. Thread-safe; what it holds has a lock of its own.
template <class T>
class PerProcess {
 public:
  T& operator*() {
    Made* now = made_.load(std::memory_order_acquire);
    while (now == nullptr || now->guard.forked()) {
      auto fresh = std::make_unique<Made>();
      fresh->before = now;
      if (made_.compare_exchange_strong(now, fresh.get())) return fresh.release()->value;
    }
    return now->value;
  }
  T* operator->() { return &**this; }

 private:
  struct Made {
    Made* before = nullptr;  // the parent's, where leak checkers find it
    ForkGuard guard;
    T value;
  };
  std::atomic<Made*> made_{nullptr};
};

}  // namespace pycollective
