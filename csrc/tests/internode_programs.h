// Real all-reduce programs for ranks of several hosts, inputs whose sum depends on the order, and
// what must come out.
#pragma once

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "kernels/kernels.h"
#include "tests/calls.h"
#include "tests/check.h"
#include "tests/program_text.h"

namespace pycollective::testing {

struct HostSchedule {
  std::vector<int> host_sizes;
  std::vector<std::shared_ptr<const Program>> programs;  // by rank
  const Program& first() const { return *programs.front(); }
};

// Those of several hosts, of which the ranks of each follow each other.
inline std::vector<HostSchedule> read_host_schedules(const std::string& path, OpKind kind) {
  std::vector<HostSchedule> schedules;
  for (auto& ranks : read_programs(path)) {
    if (ranks.front().program.kind != kind) continue;
    HostSchedule schedule;
    std::size_t next = 0;
    while (next < ranks.size()) {
      schedule.host_sizes.push_back(ranks[next].program.members);
      next += static_cast<std::size_t>(ranks[next].program.members);
    }
    for (RealProgram& real : ranks) {
      real.program.check(real.me);
      schedule.programs.push_back(std::make_shared<const Program>(std::move(real.program)));
    }
    if (schedule.host_sizes.size() > 1) schedules.push_back(std::move(schedule));
  }
  CHECK(!schedules.empty());
  return schedules;
}

// Large ones cancel, and what is left depends on where they do.
inline std::vector<float> order_dependent(int rank, std::size_t count, unsigned seed) {
  std::vector<float> x(count);
  // Cheap under TSan. It takes 0 for 1.
  std::minstd_rand random(seed * 101 + static_cast<unsigned>(rank) + 1);
  for (float& each : x) {
    const int exponent = static_cast<int>(random() % 24) - 12;
    each = std::ldexp(static_cast<float>(random() % 2001) - 1000.0F, exponent);
  }
  return x;
}

inline std::vector<float> sum_in_order(const std::vector<std::vector<float>>& leaves) {
  std::vector<const void*> inputs;
  for (const auto& leaf : leaves) inputs.push_back(leaf.data());
  std::vector<float> sum(leaves.front().size());
  const FloatEnvironment ieee;
  find_kernels(Dtype::kFloat32, ReduceOp::kSum, active_simd_level())
      .reduce(inputs.data(), static_cast<int>(leaves.size()), double(leaves.size()), sum.data(),
              nullptr, sum.size());
  return sum;
}

inline std::vector<float> sum_in_order(int ranks, std::size_t count, unsigned seed) {
  std::vector<std::vector<float>> leaves;
  for (int r = 0; r < ranks; ++r) leaves.push_back(order_dependent(r, count, seed));
  return sum_in_order(leaves);
}

inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

inline Request all_reduce(std::vector<float>& x, std::shared_ptr<const Program> program) {
  Request request = all_reduce(x);
  request.program = std::move(program);
  return request;
}

inline std::shared_ptr<const Program> program_of(const std::vector<HostSchedule>& schedules,
                                                 const std::string& algorithm, std::size_t ranks,
                                                 std::size_t hosts, int rank) {
  for (const HostSchedule& each : schedules)
    if (each.first().algorithm == algorithm && each.programs.size() == ranks &&
        each.host_sizes.size() == hosts)
      return each.programs[static_cast<std::size_t>(rank)];
  CHECK(false);
  return nullptr;
}

}  // namespace pycollective::testing
