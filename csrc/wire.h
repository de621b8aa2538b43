// How what goes to other hosts travels. The bits that arrive are the same.
#pragma once

#include <cstdint>

namespace pycollective {

enum class Wire : std::uint8_t {
  kDefault,  // the communicator's
  kAuto,     // raw or exact, whichever took less time in the first calls of a kind
  kRaw,      // as it lies in memory
  kExact,    // packed without loss (kernels/pack)
};

struct WireTraits {
  Wire wire;
  const char* name;
};

// What users may ask for.
constexpr WireTraits kWireTable[] = {
    {Wire::kAuto, "auto"},
    {Wire::kRaw, "raw"},
    {Wire::kExact, "exact"},
};

}  // namespace pycollective
