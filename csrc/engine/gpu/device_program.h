// An execution plan in the words that kernels interpret (cuda/program_parameters.h).
#pragma once

#include <cstdint>
#include <vector>

#include "cuda/program_parameters.h"
#include "engine/plans/program.h"

namespace pycollective {

struct DeviceProgram {
  std::vector<std::uint32_t> words;  // refs, then instructions
  std::uint32_t ref_count = 0;
  std::uint64_t readers = 0;  // mask
};

// Throws std::invalid_argument for a plan that kernels cannot interpret, and says why: it has
// messages between hosts, or more than fits a block.
DeviceProgram lower_for_device(const Program& program, Member me);

}  // namespace pycollective
