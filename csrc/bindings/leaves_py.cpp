// Reductions of accumulators: what pycollective.leaves.reduction has checked, as a call.
#include <exception>
#include <memory>
#include <string>
#include <utility>

#include "bindings/objects.h"

namespace py = pybind11;

namespace pycollective {
namespace {

// The attributes' names, made once: to make one costs as much as to look it up.
struct Names {
  PyObject* kind = PyUnicode_InternFromString("kind");
  PyObject* x = PyUnicode_InternFromString("x");
  PyObject* shape = PyUnicode_InternFromString("shape");
  PyObject* op = PyUnicode_InternFromString("op");
  PyObject* out = PyUnicode_InternFromString("out");
  PyObject* async_op = PyUnicode_InternFromString("async_op");
  PyObject* wire = PyUnicode_InternFromString("wire");
  PyObject* divisor = PyUnicode_InternFromString("divisor");
  PyObject* deal = PyUnicode_InternFromString("deal");
  PyObject* digest = PyUnicode_InternFromString("digest");
  PyObject* leaves = PyUnicode_InternFromString("leaves");
  PyObject* root = PyUnicode_InternFromString("root");
  PyObject* counts = PyUnicode_InternFromString("counts");
  PyObject* rows = PyUnicode_InternFromString("rows");
  PyObject* program = PyUnicode_InternFromString("program");
};

py::object read(py::handle object, PyObject* name) {
  PyObject* value = PyObject_GetAttr(object.ptr(), name);
  if (value == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(value);
}

bool is_true(const py::object& value) {
  const int truth = PyObject_IsTrue(value.ptr());
  if (truth < 0) throw py::error_already_set();
  return truth == 1;
}

}  // namespace

PyObject* reduce_leaves(PyObject* self, PyObject* reduction) {
  Communicator* core = CommunicatorObject::core_of(self);
  if (core == nullptr) return nullptr;
  try {
    static const Names names;
    const py::handle given(reduction);
    const OpKind kind =
        find_named(kOperationTable, read(given, names.kind).cast<std::string>())->kind;
    const py::object out = read(given, names.out);
    const py::object op = read(given, names.op);
    const py::object counts = read(given, names.counts);
    const py::object wire = read(given, names.wire);
    const py::object rows = read(given, names.rows);
    const py::object program = read(given, names.program);
    const py::tuple shape = read(read(given, names.x), names.shape);
    const py::object deal = read(given, names.deal);
    CallArguments arguments;
    arguments.output = out.ptr();
    arguments.op = op.ptr();
    arguments.counts = counts.ptr();
    arguments.wire = wire.ptr();
    arguments.root = read(given, names.root).cast<int>();
    DealtNodes nodes;
    nodes.deal = read(deal, names.digest).cast<std::uint64_t>();
    nodes.leaves = read(deal, names.leaves).cast<int>();
    nodes.divisor = read(given, names.divisor).cast<double>();
    auto call = std::make_unique<Call>();
    if (!call->prepare_nodes(kind, arguments, std::move(nodes), rows.ptr(), shape.ptr(),
                             core->rank(), core->size()))
      return nullptr;
    if (!program.is_none()) call->use(program.cast<ProgramHandle&>().program);
    const bool gets = has(traits_of(kind).output, core->rank(), static_cast<int>(arguments.root));
    PyObject* result = gets ? out.ptr() : Py_None;
    CommunicatorObject& object = CommunicatorObject::of(self);
    if (is_true(read(given, names.async_op)))
      return start_prepared(object, std::move(call), result);
    return run_prepared(object, *call, result);
  } catch (const std::exception&) {
    raise_current_exception();
    return nullptr;
  }
}

}  // namespace pycollective
