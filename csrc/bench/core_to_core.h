// What crossing from one core to another costs, measured by two threads pinned to two cores.
#pragma once

#include <cstddef>

namespace pycollective {

// One-way latency in seconds: half a round trip of a flag in a cache line that two cores share.
// Throws std::system_error where a thread cannot be pinned to `cpu_a` or `cpu_b`.
double core_to_core_latency(int cpu_a, int cpu_b, int round_trips);

// Seconds for either core to copy `total` bytes that the other has just written, both at once, in
// chunks of `chunk` bytes (small enough to be still in the writer's cache). Only the copies count:
// neither the writing nor the waiting for each other, so no transport can do better.
// Throws std::system_error as above.
double core_to_core_copy(int cpu_a, int cpu_b, std::size_t total, std::size_t chunk);

}  // namespace pycollective
