#include "bench/core_to_core.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <system_error>
#include <thread>
#include <vector>

namespace pycollective {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Two cells that never share a cache line, nor the line that a prefetcher fetches beside it.
struct alignas(128) Flag {
  std::atomic<long> value{0};
};

// Spins until `flag` reaches `target`. The other side is a thread of this process that is running
// a bounded loop, so this ends; it yields in case something else has taken the other core.
void wait_for(const Flag& flag, long target) {
  for (long polls = 1; flag.value.load(std::memory_order_acquire) < target; ++polls)
    if (polls % 100000 == 0) sched_yield();
}

int pin_this_thread(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  return pthread_setaffinity_np(pthread_self(), sizeof set, &set);
}

// Runs body(0) and body(1) on their own cores at once and returns the longer of their times.
double run_pinned(int cpu_a, int cpu_b, const std::function<double(int)>& body) {
  const int cpus[2] = {cpu_a, cpu_b};
  double seconds[2] = {0, 0};
  int errors[2] = {0, 0};
  Flag pinned[2];
  auto run = [&](int side) {
    errors[side] = pin_this_thread(cpus[side]);
    pinned[side].value.store(1, std::memory_order_release);
    wait_for(pinned[1 - side], 1);
    if (errors[0] == 0 && errors[1] == 0) seconds[side] = body(side);
  };
  std::thread first(run, 0);
  std::thread second(run, 1);
  first.join();
  second.join();
  for (int side = 0; side < 2; ++side)
    if (errors[side] != 0)
      throw std::system_error(errors[side], std::generic_category(),
                              "cannot pin a thread to CPU " + std::to_string(cpus[side]));
  return std::max(seconds[0], seconds[1]);
}

}  // namespace

double core_to_core_latency(int cpu_a, int cpu_b, int round_trips) {
  Flag flag;
  const double seconds = run_pinned(cpu_a, cpu_b, [&](int side) {
    const auto start = Clock::now();
    for (long trip = 0; trip < round_trips; ++trip) {
      // Side 0 turns 2t into 2t + 1, side 1 turns that into 2t + 2.
      wait_for(flag, 2 * trip + side);
      flag.value.store(2 * trip + side + 1, std::memory_order_release);
    }
    return seconds_since(start);
  });
  return seconds / (2.0 * round_trips);
}

double core_to_core_copy(int cpu_a, int cpu_b, std::size_t total, std::size_t chunk) {
  Flag written[2];
  Flag copied[2];
  std::vector<char> shared[2] = {std::vector<char>(chunk), std::vector<char>(chunk)};
  const long rounds = static_cast<long>((total + chunk - 1) / chunk);
  return run_pinned(cpu_a, cpu_b, [&](int side) {
    std::vector<char> own(chunk);
    double seconds = 0;
    for (long round = 0; round < rounds; ++round) {
      std::memset(shared[side].data(), static_cast<int>(round), chunk);
      written[side].value.store(round + 1, std::memory_order_release);
      wait_for(written[1 - side], round + 1);
      const std::size_t left = total - static_cast<std::size_t>(round) * chunk;
      const auto start = Clock::now();
      std::memcpy(own.data(), shared[1 - side].data(), std::min(chunk, left));
      seconds += seconds_since(start);
      // The other side may write its next chunk only once this one has been read.
      copied[side].value.store(round + 1, std::memory_order_release);
      wait_for(copied[1 - side], round + 1);
    }
    return seconds;
  });
}

}  // namespace pycollective
