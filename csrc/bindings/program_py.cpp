#include "bindings/objects.h"

#include <pybind11/stl.h>

#include <array>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bindings/gil.h"

namespace py = pybind11;

namespace pycollective {
namespace {

OpKind kind_named(const std::string& name) {
  if (const OperationTraits* found = find_named(kOperationTable, name)) return found->kind;
  throw std::invalid_argument("no operation '" + name + "'");
}

Pieces pieces_named(const std::string& name) {
  if (name == "cut") return Pieces::kCut;
  if (name == "ranks") return Pieces::kRanks;
  if (name == "pairs") return Pieces::kPairs;
  throw std::invalid_argument("no such pieces: '" + name + "'");
}

template <class T>
T number(int value, int end, const char* what) {
  if (value < 0 || value >= end) throw std::invalid_argument(std::string("unknown ") + what);
  return static_cast<T>(value);
}

// From pycollective/schedule/plan.py's Plan, whose fields have the same names.
ProgramHandle from_python(const py::object& given) {
  auto program = std::make_shared<Program>();
  const auto get = [&](const char* name) { return given.attr(name); };
  const auto numbers = [&](const char* name) { return get(name).cast<std::vector<int>>(); };
  program->algorithm = get("algorithm").cast<std::string>();
  program->kind = kind_named(get("operation").cast<std::string>());
  program->root = get("root").cast<int>();
  program->rank = get("rank").cast<int>();
  program->ranks = get("ranks").cast<int>();
  program->members = get("members").cast<int>();
  program->steps = get("steps").cast<int>();
  program->pieces = pieces_named(get("pieces").cast<std::string>());
  program->shards = get("shards").cast<int>();
  program->leaves = get("leaves").cast<int>();
  program->rows = get("rows").cast<int>();
  program->deal = get("deal").cast<std::uint64_t>();
  program->nodes = get("nodes").cast<int>();
  program->items = get("items").cast<int>();
  for (const auto& [place, member, shard, index] :
       get("refs").cast<std::vector<std::array<int, 4>>>())
    program->refs.push_back({number<Place>(place, 4, "place"), Member(member), shard, index});
  for (const auto& [kind, a, b, c] : get("instructions").cast<std::vector<std::array<int, 4>>>())
    program->instructions.push_back(
        {number<Instruction::Kind>(kind, 8, "kind of instruction"), a, b, c});
  for (const auto& [first_term, terms, first_recipe, length, finish] :
       get("combines").cast<std::vector<std::array<int, 5>>>())
    program->combines.push_back({first_term, terms, first_recipe, length, finish != 0});
  program->terms = numbers("terms");
  for (const int each : numbers("recipes"))
    program->recipes.push_back(number<std::uint8_t>(each, 2, "step of a recipe"));
  for (const int reader : numbers("readers")) program->readers.emplace_back(reader);
  for (const auto& [rank, step, first, count] :
       get("messages").cast<std::vector<std::array<int, 4>>>())
    program->messages.push_back({rank, step, first, count});
  program->message_pieces = numbers("message_pieces");
  program->peers = numbers("peers");
  program->check(Member(get("member").cast<int>()));
  return {std::move(program)};
}

[[noreturn]] void throw_as_configuration(OpKind kind, py::error_already_set& error) {
  if (!error.matches(PyExc_Exception)) throw;  // an interrupt
  std::string text = py::str(error.value());
  const std::string type = py::str(error.type().attr("__name__"));
  if (type != "ConfigurationError") text = "no plan could be made: " + type + ": " + text;
  throw CollectiveFailure({FailureKind::kConfiguration, -1, kind, 0, std::move(text)});
}

}  // namespace

PlanCache::Source plan_source(py::object planner, bool chooses) {
  // Whoever lets go of it last may not hold the interpreter.
  const std::shared_ptr<py::object> shared(new py::object(std::move(planner)), [](py::object* it) {
    const GilHeld gil;
    delete it;
  });
  PlanCache::Source source;
  source.make = [shared](OpKind kind, const std::string& algorithm, int root) {
    const GilHeld gil;
    try {
      return (*shared)(name_of(kind), algorithm, root).cast<ProgramHandle&>().program;
    } catch (py::error_already_set& error) {
      throw_as_configuration(kind, error);
    }
  };
  if (chooses)
    source.choose = [shared](const Request& request, std::size_t bytes) {
      const GilHeld gil;
      try {
        return shared->attr("choose")(name_of(request.kind), bytes, name_of(request.dtype))
            .cast<std::string>();
      } catch (py::error_already_set& error) {
        throw_as_configuration(request.kind, error);
      }
    };
  return source;
}

void bind_program(py::module_& module) {
  py::class_<ProgramHandle>(module, "Program", py::is_final(),
                            "A schedule's program for one rank, checked.")
      .def(py::init(&from_python), py::arg("program"));
}

}  // namespace pycollective
