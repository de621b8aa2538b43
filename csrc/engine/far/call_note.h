// What a rank called, as it travels between hosts.
#pragma once

#include <cstdint>
#include <string>

#include "engine/operation.h"
#include "transport/layout.h"

namespace pycollective {

struct CallNote {
  std::uint64_t sequence = 0;
  std::uint64_t signature = 0;
  std::uint64_t count = 0;
  std::uint64_t counts_hash = 0;
  char algorithm[sizeof(Arrival::algorithm)] = {};

  CallNote() = default;
  CallNote(const Request& request, std::uint64_t number);
  bool agrees(const CallNote& other) const;
  std::string describe() const;
};

}  // namespace pycollective
