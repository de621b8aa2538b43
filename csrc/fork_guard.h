// Knows whether this process is a fork of the one that made an object.
//
// After fork the child has the parent's objects without its mappings (MADV_DONTFORK) and without
// its threads. Whatever would touch them asks here first.
//
// A shared library counts forks for itself from its first guard on, so what one has made another
// does not ask.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>

namespace pycollective {

class ForkGuard {
 public:
  ForkGuard() : born_(generation().load(std::memory_order_relaxed)) {
    static const int registered = pthread_atfork(
        nullptr, nullptr, [] { generation().fetch_add(1, std::memory_order_relaxed); });
    (void)registered;
  }
  // A load and a compare: cheap enough for every call.
  bool forked() const { return generation().load(std::memory_order_relaxed) != born_; }

 private:
  // How many forks lie between this process and the first.
  static std::atomic<std::uint64_t>& generation() {
    static std::atomic<std::uint64_t> forks{0};
    return forks;
  }

  std::uint64_t born_;
};

}  // namespace pycollective
