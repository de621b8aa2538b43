// What the ordered reduce is given: shared by host and kernels.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pycollective::cuda {

constexpr int kMostLeaves = 64;  // as many as a host may have ranks (shared_memory/member.h)

// Pointers are the device's, of any alignment. `out` may be exactly one of the leaves; no other
// overlap.
struct ReduceParameters {
  const void* leaves[kMostLeaves];
  void* out;
  void* copy;           // where a second copy of the result goes, or null; overlaps nothing
  std::uint64_t count;  // elements
  std::int32_t n;       // leaves, 1 to kMostLeaves; `avg` divides by it
};

}  // namespace pycollective::cuda
