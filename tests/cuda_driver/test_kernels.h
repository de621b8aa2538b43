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

struct Wait {
  const std::uint32_t* word;
  std::uint32_t value;
  std::uint32_t* blocks;  // counts those that wait; may be null
};

}  // namespace pycollective::cuda::testing
