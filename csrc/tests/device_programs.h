// The programs that kernels carry out in tests, by rank.
#pragma once

#include "engine/gpu/device_program.h"
#include "tests/program_text.h"

namespace pycollective::testing {

using Programs = std::vector<std::shared_ptr<const Program>>;  // by rank

inline Programs one_shot(int ranks) {
  Programs programs;
  for (int r = 0; r < ranks; ++r)
    programs.push_back(make_one_shot(OpKind::kAllReduce, 0, r, ranks));
  return programs;
}

// Those of the first schedule that is of this kind, on one host.
inline Programs programs_of(const char* algorithm, OpKind kind, int ranks) {
  for (const char* file : {"programs.txt", "device_programs.txt"})
    for (std::vector<RealProgram>& schedule : read_programs(file)) {
      const Program& first = schedule.front().program;
      if (first.ranks != ranks || first.members != ranks || first.kind != kind ||
          first.algorithm != algorithm)
        continue;
      Programs programs;
      for (RealProgram& each : schedule)
        programs.push_back(std::make_shared<const Program>(std::move(each.program)));
      return programs;
    }
  CHECK(false);
  return {};
}

}  // namespace pycollective::testing
