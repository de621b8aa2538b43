// Knows whether this process is a fork of the one that made an object.
//
// After fork the child has the parent's objects without its mappings (MADV_DONTFORK) and without
// its threads. Whatever would touch them asks here first.
//
// A shared library counts forks for itself, from when it is loaded, so what one has made another
// does not ask.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>

namespace pycollective {

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

}  // namespace pycollective
