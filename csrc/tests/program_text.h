// Programs of real schedules, as tests/schedule/native_plans.py writes them: a schedule's in a line
// of text (FILE.txt), or, where they are large, words in a line and numbers in binary behind it.
#pragma once

#include <cstdint>
#include <fstream>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "engine/plans/program.h"
#include "tests/check.h"

namespace pycollective::testing {

struct RealProgram {
  Member me;
  Program program;
};

// The numbers of a program, one after the other.
class Numbers {
 public:
  explicit Numbers(std::vector<std::int32_t> numbers) : numbers_(std::move(numbers)) {}

  std::int32_t next() {
    CHECK(at_ < numbers_.size());
    return numbers_[at_++];
  }
  // A list of what `make()` takes one of from here, each of `width` numbers.
  template <class T, class Make>
  void read(std::vector<T>& list, std::size_t width, const Make& make) {
    const auto length = static_cast<std::size_t>(next());
    list.reserve(length / width);
    for (std::size_t end = at_ + length; at_ < end;) list.push_back(make());
  }
  bool over() const { return at_ == numbers_.size(); }

 private:
  const std::vector<std::int32_t> numbers_;
  std::size_t at_ = 0;
};

// `words`: the algorithm, the operation and the pieces.
inline RealProgram read_program(const std::string (&words)[3], Numbers numbers) {
  RealProgram real;
  Program& p = real.program;
  const auto& [algorithm, operation, pieces] = words;
  p.algorithm = algorithm;
  p.kind = find_named(kOperationTable, operation)->kind;
  p.pieces = pieces == "cut" ? Pieces::kCut : pieces == "ranks" ? Pieces::kRanks : Pieces::kPairs;
  const auto next = [&] { return numbers.next(); };
  const auto next_member = [&] { return Member(next()); };
  p.root = next(), p.rank = next(), p.ranks = next();
  real.me = next_member();
  p.members = next(), p.steps = next(), p.shards = next(), p.nodes = next(), p.items = next();
  // In braces, so that they are taken from left to right.
  numbers.read(p.refs, 4,
               [&] { return Ref{static_cast<Place>(next()), next_member(), next(), next()}; });
  numbers.read(p.instructions, 4, [&] {
    return Instruction{static_cast<Instruction::Kind>(next()), next(), next(), next()};
  });
  numbers.read(p.combines, 5,
               [&] { return CombineStep{next(), next(), next(), next(), next() != 0}; });
  numbers.read(p.terms, 1, next);
  numbers.read(p.recipes, 1, [&] { return static_cast<std::uint8_t>(next()); });
  numbers.read(p.readers, 1, next_member);
  numbers.read(p.messages, 4, [&] { return Message{next(), next(), next(), next()}; });
  numbers.read(p.message_pieces, 1, next);
  numbers.read(p.peers, 1, next);
  if (!numbers.over()) p.leaves = next(), p.rows = next();
  CHECK(numbers.over());
  return real;
}

template <class T>
std::vector<std::int32_t> read_numbers(std::istream& file, std::size_t count) {
  std::vector<T> numbers(count);
  const auto bytes = static_cast<std::streamsize>(count * sizeof(T));
  CHECK(file.read(reinterpret_cast<char*>(numbers.data()), bytes));
  return {numbers.begin(), numbers.end()};
}

// By schedule: the programs of all its ranks.
inline std::vector<std::vector<RealProgram>> read_programs(const std::string& path) {
  const bool text = path.size() > 4 && path.compare(path.size() - 4, 4, ".txt") == 0;
  std::ifstream file(path, std::ios::binary);
  CHECK(file.good());
  std::vector<std::vector<RealProgram>> schedules;
  std::istringstream line;
  const auto next = [&](std::string& program) {
    if (std::getline(line, program, '/')) return true;
    std::string text_line;
    if (!std::getline(file, text_line)) return false;
    line = std::istringstream(text_line);
    return static_cast<bool>(std::getline(line, program, '/'));
  };
  for (std::string each_program; next(each_program);) {
    std::istringstream words(each_program);
    std::string name[3];
    for (std::string& each : name) words >> each;
    std::vector<std::int32_t> numbers;
    if (text) {
      for (std::int32_t each; words >> each;) numbers.push_back(each);
      CHECK(words.eof());
    } else {
      int width = 0;
      std::size_t count = 0;
      CHECK(words >> width >> count && (width == 2 || width == 4));
      numbers = width == 2 ? read_numbers<std::int16_t>(file, count)
                           : read_numbers<std::int32_t>(file, count);
    }
    RealProgram real = read_program(name, Numbers(std::move(numbers)));
    if (real.program.rank == 0) schedules.emplace_back();
    schedules.back().push_back(std::move(real));
  }
  return schedules;
}

}  // namespace pycollective::testing
