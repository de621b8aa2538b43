// How what goes to other hosts travels. The bits that arrive are the same.
#pragma once

#include <cstdint>

namespace pycollective {

enum class Wire : std::uint8_t {
  kDefault = 0,  // the communicator's
  kRaw = 2,      // as it lies in memory
  kExact = 3,    // packed without loss (kernels/pack)
};

struct WireTraits {
  Wire wire;
  const char* name;
};

// What users may ask for.
constexpr WireTraits kWireTable[] = {
    {Wire::kRaw, "raw"},
    {Wire::kExact, "exact"},
};

}  // namespace pycollective
