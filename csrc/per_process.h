// What a process has one of.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <memory>

namespace pycollective {

// Knows whether this process is a fork of the one that made an object.
//
// After fork the child has the parent's objects without its mappings (MADV_DONTFORK) and without
// its threads. Whatever would touch them asks here first.
//
// A shared library counts forks for itself, from when it is loaded, so what one has made another
// does not ask.
class ForkGuard {
 public:
  ForkGuard() : born_(forks_.load(std::memory_order_relaxed)) {}
  // A load and a compare: cheap enough for every call.
  bool forked() const { return forks_.load(std::memory_order_relaxed) != born_; }

 private:
  // How many forks lie between this process and the first.
  static inline std::atomic<std::uint64_t> forks_{0};
  // When the library is loaded: a first guard that did it could be forked amidst, and the child
  // wait for ever for the thread that it does not have.
  static inline const int registered_ =
      pthread_atfork(nullptr, nullptr, [] { forks_.fetch_add(1, std::memory_order_relaxed); });

  std::uint64_t born_;
};

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
