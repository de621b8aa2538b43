#include "bindings/kernels_py.h"

#include <pybind11/stl.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings/array_view.h"
#include "bindings/errors_py.h"

namespace py = pybind11;

namespace pycollective {

SimdLevel level_named(const std::string& name) {
  if (name.empty()) return active_simd_level();
  for (const SimdLevel level : kSimdLevels)
    if (name == name_of(level) && level <= supported_simd_level()) return level;
  throw std::invalid_argument("this CPU has no SIMD level '" + name + "'");
}

namespace {

ReduceOp op_named(const std::string& name) {
  if (const ReduceOpTraits* found = find_named(kReduceOpTable, name)) return found->op;
  throw std::invalid_argument("no reduce op '" + name + "'");
}

void reduce_into(const std::vector<py::object>& inputs, const std::string& op,
                 const py::object& out, const py::object& copy, const std::string& simd) {
  const auto opened = [](const py::object& array, const char* name) {
    auto view = std::make_unique<ArrayView>();
    if (!view->open(array.ptr(), name)) throw py::error_already_set();
    return view;
  };
  if (inputs.empty()) throw std::invalid_argument("there must be at least one input");
  std::vector<std::unique_ptr<ArrayView>> views;
  std::vector<const void*> leaves;
  for (const py::object& input : inputs) {
    views.push_back(opened(input, "an input"));
    leaves.push_back(views.back()->data());
  }
  views.push_back(opened(out, "out"));
  if (!copy.is_none()) views.push_back(opened(copy, "copy"));
  for (const auto& view : views)
    if (view->dtype() != views[0]->dtype() || view->count() != views[0]->count() ||
        !view->contiguous())
      throw std::invalid_argument("arrays must be contiguous and alike");
  const ReduceFn reduce = find_kernels(views[0]->dtype(), op_named(op), level_named(simd)).reduce;
  if (reduce == nullptr)
    throw std::invalid_argument(op + " has no meaning for " + name_of(views[0]->dtype()));
  const FloatEnvironment ieee;
  reduce(leaves.data(), static_cast<int>(leaves.size()), views[leaves.size()]->data(),
         copy.is_none() ? nullptr : views.back()->data(), views[0]->count());
}

// Errors as Python knows them.
void reduce_or_raise(const std::vector<py::object>& inputs, const std::string& op,
                     const py::object& out, const py::object& copy, const std::string& simd) {
  translated([&] { reduce_into(inputs, op, out, copy, simd); });
}

}  // namespace

void bind_kernels(py::module_& module) {
  module.def("reduce_into", &reduce_or_raise, py::arg("inputs"), py::arg("op"), py::arg("out"),
             py::arg("copy") = py::none(), py::arg("simd") = "",
             "One native kernel call, as the engine makes it: reduce the leaves `inputs`, arrays "
             "alike in dtype and count, into `out` (which may be one of them) and `copy`.");
  module.def(
      "simd_levels",
      [] {
        std::vector<std::string> names;
        for (const SimdLevel level : kSimdLevels)
          if (level <= supported_simd_level()) names.emplace_back(name_of(level));
        return names;
      },
      "The levels that this CPU can run, the best last.");
  module.def(
      "simd_level", [] { return std::string(name_of(active_simd_level())); },
      "The level in force: PYCOLLECTIVE_SIMD, or the best.");
}

}  // namespace pycollective
