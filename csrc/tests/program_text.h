// Programs of real schedules, from the lines that tests/schedule/native_programs.py writes.
#pragma once

#include <fstream>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "engine/program.h"
#include "tests/check.h"

namespace pycollective::testing {

struct RealProgram {
  Member me;
  Program program;
};

inline RealProgram read_program(const std::string& line) {
  std::istringstream text(line);
  RealProgram real;
  Program& p = real.program;
  std::string operation;
  std::string pieces;
  int member = 0;
  text >> p.algorithm >> operation >> pieces >> p.root >> p.rank >> p.ranks >> member;
  text >> p.members >> p.tags >> p.shards >> p.nodes >> p.items;
  p.kind = find_named(kOperationTable, operation)->kind;
  p.pieces = pieces == "cut" ? Pieces::kCut : pieces == "ranks" ? Pieces::kRanks : Pieces::kPairs;
  real.me = Member(member);
  const auto list = [&] {
    std::size_t length = 0;
    text >> length;
    std::vector<int> numbers(length);
    for (int& each : numbers) text >> each;
    return numbers;
  };
  const std::vector<int> refs = list();
  for (std::size_t i = 0; i < refs.size(); i += 4)
    p.refs.push_back({static_cast<Place>(refs[i]), Member(refs[i + 1]), refs[i + 2], refs[i + 3]});
  const std::vector<int> instructions = list();
  for (std::size_t i = 0; i < instructions.size(); i += 4)
    p.instructions.push_back({static_cast<Instruction::Kind>(instructions[i]), instructions[i + 1],
                              instructions[i + 2], instructions[i + 3]});
  const std::vector<int> combines = list();
  for (std::size_t i = 0; i < combines.size(); i += 5)
    p.combines.push_back(
        {combines[i], combines[i + 1], combines[i + 2], combines[i + 3], combines[i + 4] != 0});
  p.terms = list();
  for (const int each : list()) p.recipes.push_back(static_cast<std::uint8_t>(each));
  for (const int each : list()) p.readers.emplace_back(each);
  const std::vector<int> messages = list();
  for (std::size_t i = 0; i < messages.size(); i += 4)
    p.messages.push_back({messages[i], messages[i + 1], messages[i + 2], messages[i + 3]});
  p.message_pieces = list();
  p.far = list();
  CHECK(!text.fail());
  return real;
}

// By schedule: the programs of all its ranks.
inline std::vector<std::vector<RealProgram>> read_programs(const char* path) {
  std::ifstream file(path);
  CHECK(file.good());
  std::vector<std::vector<RealProgram>> schedules;
  for (std::string line; std::getline(file, line);) {
    RealProgram real = read_program(line);
    if (real.program.rank == 0) schedules.emplace_back();
    schedules.back().push_back(std::move(real));
  }
  return schedules;
}

}  // namespace pycollective::testing
