// pycollective._core: the native core, as Python sees it.
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "bindings/array_view.h"
#include "bindings/errors_py.h"
#include "types.h"

namespace py = pybind11;

namespace pycollective {

// What the other files of bindings put into it.
void bind_reductions(py::module_& module);
void bind_compression(py::module_& module);
void bind_node(py::module_& module);
void bind_program(py::module_& module);
void bind_link(py::module_& module);
void bind_work(py::module_& module);
void bind_communicator(py::module_& module);
void bind_shutdown(py::module_& module);
void bind_machine(py::module_& module);
void bind_cuda(py::module_& module);
void bind_device_group(py::module_& module);

namespace {

const char* numbers_of(const DtypeTraits& row) {
  switch (row.numbers) {
    case Numbers::kFloat:
      return "float";
    case Numbers::kInteger:
      return "integer";
    default:
      return "bool";
  }
}

const char* pieces_of(const OperationTraits& row) {
  switch (row.pieces) {
    case Pieces::kCut:
      return "cut";
    case Pieces::kRanks:
      return "ranks";
    default:
      return "pairs";
  }
}

std::vector<std::string> reduce_ops_of(const DtypeTraits& row) {
  std::vector<std::string> names;
  for (const ReduceOpTraits& op : kReduceOpTable)
    if (is_defined(row.dtype, op.op)) names.emplace_back(op.name);
  return names;
}

}  // namespace

void bind_traits(py::module_& module) {
  py::class_<DtypeTraits>(module, "Dtype", py::is_final(), "What an element type is.")
      .def_readonly("name", &DtypeTraits::name, "As NumPy or ml_dtypes, and torch, have it.")
      .def_property_readonly(
          "alias", [](const DtypeTraits& row) { return row.alias ? row.alias : ""; },
          "nccl-tests' name, where it is another.")
      .def_property_readonly("numbers", &numbers_of, "\"float\", \"integer\" or \"bool\".")
      .def_readonly("size", &DtypeTraits::size, "Bytes.")
      .def_readonly("accumulator", &DtypeTraits::accumulator,
                    "Bytes of the type in which sums are computed, and partial ones travel.")
      .def_readonly("mantissa", &DtypeTraits::mantissa, "Stored bits of a float's.")
      .def_readonly("largest", &DtypeTraits::largest, "Bits of a float's largest number.")
      .def_readonly("nan", &DtypeTraits::nan, "Bits of a float's one quiet NaN.")
      .def_property_readonly(
          "in_numpy", [](const DtypeTraits& row) { return row.numpy_kind != 0; },
          "Whether NumPy has it; otherwise ml_dtypes does.")
      .def_property_readonly("reduce_ops", &reduce_ops_of, "Those that have a meaning for it.");
  py::class_<OperationTraits>(module, "Operation", py::is_final(), "What an operation is.")
      .def_readonly("name", &OperationTraits::name)
      .def_property_readonly("pieces", &pieces_of, "As in pycollective/schedule/operation.py.")
      .def_readonly("reduces", &OperationTraits::reduces, "Whether it computes.")
      .def_readonly("rooted", &OperationTraits::rooted, "Whether all ranks name one root.")
      .def_readonly("pair", &OperationTraits::pair, "Whether it is between two ranks.")
      .def_property_readonly(
          "takes_counts", [](const OperationTraits& row) { return takes_counts(row.kind); },
          "Whether shards may be uneven.");
  module.def(
      "dtypes", [] { return std::vector(std::begin(kDtypeTable), std::end(kDtypeTable)); },
      "The element types.");
  module.def(
      "reduce_ops",
      [] {
        std::vector<std::string> names;
        for (const ReduceOpTraits& row : kReduceOpTable) names.emplace_back(row.name);
        return names;
      },
      "The names of the reduce operations.");
  module.def(
      "wires",
      [] {
        std::vector<std::string> names;
        for (const WireTraits& row : kWireTable) names.emplace_back(row.name);
        return names;
      },
      "How what goes to other hosts may travel.");
  module.def(
      "operations",
      [] { return std::vector(std::begin(kOperationTable), std::end(kOperationTable)); },
      "The operations.");
}

}  // namespace pycollective

PYBIND11_MODULE(_core, module) {
  using namespace pycollective;
  module.doc() = "The native core of pycollective.";
  if (!init_errors() || !init_array_view()) throw pybind11::error_already_set();
  bind_traits(module);
  bind_reductions(module);
  bind_compression(module);
  bind_node(module);
  bind_program(module);
  bind_link(module);
  bind_work(module);
  bind_communicator(module);
  bind_shutdown(module);
  bind_machine(module);
  bind_cuda(module);
  bind_device_group(module);
}
