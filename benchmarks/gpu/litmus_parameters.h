// What the litmus kernel is given (litmus.cu says what it does): shared by host and kernel.
//
// Each of the two has an area of its own, which the other maps:
//
//   flags[block]           a line each, whose first word is the other's mark (cuda/mailbox.h)
//   slots[block][slots]    of `words` each, of which all hold the number of one exchange
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/mailbox.h"

namespace pycollective::cuda {

enum class Flags : std::uint32_t {
  kProtocol,   // release and acquire, as the library's
  kRelaxed,    // neither: how often does it go wrong here?
  kEarly,      // the mark is told before the data are written: must be seen as stale
  kEarlyDone,  // having read is told before it is so: must be seen as overwritten
};

struct LitmusCount {
  std::uint32_t stale;        // words that were of an earlier exchange: the mark passed its data
  std::uint32_t overwritten;  // of a later one: the slot was written before it had been read
  std::uint32_t late;         // waits that ended by their deadline
  std::uint32_t exchanges;
};

struct LitmusParameters {
  void* mine;
  void* other;          // as mapped here
  LitmusCount* counts;  // [block][thread], added to
  std::uint32_t first;  // exchange of this launch; the first of all is 0
  std::uint32_t exchanges;
  std::uint32_t words;        // of a slot
  std::uint32_t slots;        // 1: written again as soon as the other has read; 2: as the library
  std::uint64_t nanoseconds;  // that a wait may last
  Flags flags;
  bool lingers;  // after an early mark: one of the two alone, or both would wait alike
};

constexpr std::uint64_t kLitmusLine = 256;

PYCOLLECTIVE_HD constexpr std::uint64_t litmus_slot_at(std::uint32_t blocks, std::uint32_t block,
                                                       std::uint32_t slots, std::uint32_t slot,
                                                       std::uint32_t words) {
  return kLitmusLine * blocks + (std::uint64_t{block} * slots + slot) * words * 4;
}

}  // namespace pycollective::cuda
