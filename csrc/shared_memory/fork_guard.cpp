#include "shared_memory/fork_guard.h"

#include <pthread.h>

#include <atomic>

namespace pycollective {
namespace {

std::atomic<std::uint64_t> generation{0};

void in_child() { generation.fetch_add(1, std::memory_order_relaxed); }

}  // namespace

ForkGuard::ForkGuard() : born_(generation.load(std::memory_order_relaxed)) {
  static const int registered = pthread_atfork(nullptr, nullptr, in_child);
  (void)registered;
}

bool ForkGuard::forked() const { return generation.load(std::memory_order_relaxed) != born_; }

}  // namespace pycollective
