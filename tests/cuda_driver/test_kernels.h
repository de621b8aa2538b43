// Parameters of the test kernels. Pointers are a device's.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pycollective::cuda::testing {

struct Copy {
  const std::uint32_t* from;
  std::uint32_t* to;
  std::size_t words;
};

// What is wrong with an exchange, planted.
enum class Fault : unsigned { kNone, kRelaxedFlag, kFlagBeforeData };

struct Exchange {
  std::uint32_t *data, *own;
  const std::uint32_t *peer_data, *other;
  const std::uint32_t* abort;  // may be null
  std::uint32_t *got, *ended;
  std::uint32_t value;
  unsigned words;  // at most as many as threads
  Fault fault;
  std::uint64_t nanoseconds;
};

struct Wait {
  const std::uint32_t* word;
  std::uint32_t value;
  std::uint32_t* blocks;  // counts those that wait; may be null
};

}  // namespace pycollective::cuda::testing
