// What a rank called, and as which number, as it travels between hosts.
#pragma once

#include <cstdint>
#include <string>

#include "engine/operations/call_signature.h"

namespace pycollective {

struct CallNote {
  std::uint64_t sequence = 0;
  Called called;

  bool agrees(const CallNote& other) const {
    return sequence == other.sequence && agree(called, other.called);
  }
  std::string describe() const {
    return pycollective::describe(called) + " as number " + std::to_string(sequence);
  }
};

}  // namespace pycollective
