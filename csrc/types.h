// The words that every native file shares.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "collective.h"
#include "dtype.h"

namespace pycollective {

// To how many ranks of a communicator, over all hosts, the native code can count. (Those of one
// host are Members, shared_memory/layout.h.) More would need shards of pairs to be counted in more
// than 31 bits (engine/plans/program.h), and recipes a deeper stack than 16 operands
// (kernels/combine.inl). How many there may be is less, as far as joining and the schedules are
// tested: MAX_RANKS (pycollective/config.py), which can grow up to here without a change of what is
// compiled.
constexpr int kCountableRanks = 1 << 15;

// The row of a table with this name; nullptr where there is none.
template <class Traits, std::size_t N>
constexpr const Traits* find_named(const Traits (&table)[N], std::string_view name) {
  for (const Traits& row : table)
    if (name == row.name) return &row;
  return nullptr;
}

// "float16, bfloat16, ... and bool", each between two `quote`s.
template <class Traits, std::size_t N>
std::string list_names(const Traits (&table)[N], const char* quote = "") {
  std::string list;
  for (std::size_t i = 0; i < N; ++i)
    list += (i == 0       ? ""
             : i + 1 == N ? " and "
                          : ", ") +
            std::string(quote) + table[i].name + quote;
  return list;
}

// How what goes to other hosts travels. The bits that arrive are the same.
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
