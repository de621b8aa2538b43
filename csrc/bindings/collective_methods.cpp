// The collectives as Python methods, from one table: what each parameter of each method means.
//
// They are written against CPython's own API rather than pybind11's: a small all-reduce takes
// 0.2 us, and pybind11's dispatch alone would add twice as much.
#include <array>
#include <climits>
#include <cstddef>
#include <string_view>
#include <utility>

#include "bindings/call.h"
#include "bindings/collective_docs.h"
#include "bindings/communicator_object.h"
#include "bindings/gil.h"
#include "bindings/program_py.h"

namespace py = pybind11;

namespace pycollective {
namespace {

// Positional and keyword arguments of a METH_FASTCALL method, without building a tuple or a dict.
template <std::size_t N>
class MethodArguments {
 public:
  // `names`: the parameters in order, null after the last; the first `required` must be given.
  MethodArguments(const char* method, const char* const (&names)[N], std::size_t required)
      : method_(method), names_(names), required_(required) {}

  // False with a TypeError set. The values are borrowed from the caller.
  bool read(PyObject* const* args, Py_ssize_t positional, PyObject* keywords) {
    std::size_t most = 0;
    while (most < N && names_[most] != nullptr) ++most;
    if (positional > static_cast<Py_ssize_t>(most)) {
      PyErr_Format(PyExc_TypeError, "%s() takes at most %zu arguments", method_, most);
      return false;
    }
    for (Py_ssize_t i = 0; i < positional; ++i) values_[static_cast<std::size_t>(i)] = args[i];
    const Py_ssize_t named = keywords != nullptr ? PyTuple_GET_SIZE(keywords) : 0;
    for (Py_ssize_t i = 0; i < named; ++i)
      if (!read_keyword(PyTuple_GET_ITEM(keywords, i), args[positional + i])) return false;
    for (std::size_t i = 0; i < required_; ++i) {
      if (values_[i] != nullptr) continue;
      PyErr_Format(PyExc_TypeError, "%s() needs the argument '%s'", method_, names_[i]);
      return false;
    }
    return true;
  }

  PyObject* operator[](std::size_t i) const { return values_[i]; }
  bool has(std::size_t i) const { return values_[i] != nullptr && values_[i] != Py_None; }

  // Both leave the default where the argument was not given; false with an error set.
  bool flag(std::size_t i, bool& value) const {
    if (values_[i] == nullptr) return true;
    const int truth = PyObject_IsTrue(values_[i]);
    value = truth == 1;
    return truth >= 0;
  }
  bool integer(std::size_t i, long& value) const {
    if (values_[i] == nullptr) return true;
    int overflow = 0;
    value = PyLong_AsLongAndOverflow(values_[i], &overflow);
    if (overflow != 0) value = overflow > 0 ? LONG_MAX : LONG_MIN;  // out of any caller's range
    return value != -1 || PyErr_Occurred() == nullptr;
  }

 private:
  bool read_keyword(PyObject* name, PyObject* value) {
    for (std::size_t i = 0; i < N && names_[i] != nullptr; ++i) {
      if (PyUnicode_CompareWithASCIIString(name, names_[i]) != 0) continue;
      if (values_[i] != nullptr) {
        PyErr_Format(PyExc_TypeError, "%s() got '%s' twice", method_, names_[i]);
        return false;
      }
      values_[i] = value;
      return true;
    }
    PyErr_Format(PyExc_TypeError, "%s() has no argument %R", method_, name);
    return false;
  }

  const char* method_;
  const char* const (&names_)[N];
  std::size_t required_;
  std::array<PyObject*, N> values_{};
};

enum class Role {
  kNone,
  kInput,
  kOutput,
  kInPlace,     // read, and written unless an output is given
  kRootSends,   // read on the root, written elsewhere
  kRootInput,   // needed on the root, ignored elsewhere
  kRootOutput,  // needed on the root, ignored elsewhere
  kOp,
  kRoot,  // or the peer
  kTag,
  kCounts,
  kAsync,
  kAlgorithm,
  kWire,
  kStream,
};

struct Parameter {
  const char* name;
  Role role;
};

constexpr std::size_t kMostParameters = 8;

struct Method {
  OpKind kind;
  std::size_t required;  // how many of the parameters
  Parameter parameters[kMostParameters];
  const char* doc;
};

constexpr Parameter kOpParameter = {"op", Role::kOp};
constexpr Parameter kRootParameter = {"root", Role::kRoot};
constexpr Parameter kCountsParameter = {"counts", Role::kCounts};
constexpr Parameter kAsyncParameter = {"async_op", Role::kAsync};
constexpr Parameter kAlgorithmParameter = {"algorithm", Role::kAlgorithm};
constexpr Parameter kWireParameter = {"wire", Role::kWire};
constexpr Parameter kStreamParameter = {"stream", Role::kStream};

constexpr Method kMethods[kCollectiveMethods] = {
    {OpKind::kAllReduce,
     1,
     {{"x", Role::kInPlace},
      kOpParameter,
      {"out", Role::kOutput},
      kAsyncParameter,
      kAlgorithmParameter,
      kWireParameter,
      kStreamParameter},
     docs::kAllReduce},
    {OpKind::kReduce,
     1,
     {{"x", Role::kInPlace},
      kRootParameter,
      kOpParameter,
      {"out", Role::kOutput},
      kAsyncParameter,
      kAlgorithmParameter,
      kWireParameter,
      kStreamParameter},
     docs::kReduce},
    {OpKind::kReduceScatter,
     2,
     {{"out", Role::kOutput},
      {"x", Role::kInput},
      kOpParameter,
      kCountsParameter,
      kAsyncParameter,
      kAlgorithmParameter,
      kWireParameter,
      kStreamParameter},
     docs::kReduceScatter},
    {OpKind::kAllGather,
     2,
     {{"out", Role::kOutput},
      {"x", Role::kInput},
      kCountsParameter,
      kAsyncParameter,
      kAlgorithmParameter,
      kWireParameter,
      kStreamParameter},
     docs::kAllGather},
    {OpKind::kBroadcast,
     1,
     {{"x", Role::kRootSends},
      kRootParameter,
      kAsyncParameter,
      kAlgorithmParameter,
      kWireParameter,
      kStreamParameter},
     docs::kBroadcast},
    {OpKind::kAllToAll,
     2,
     {{"out", Role::kOutput},
      {"x", Role::kInput},
      kAsyncParameter,
      kAlgorithmParameter,
      kWireParameter,
      kStreamParameter},
     docs::kAllToAll},
    {OpKind::kGather,
     2,
     {{"out", Role::kRootOutput},
      {"x", Role::kInput},
      kRootParameter,
      kCountsParameter,
      kAsyncParameter,
      kAlgorithmParameter,
      kWireParameter,
      kStreamParameter},
     docs::kGather},
    {OpKind::kScatter,
     2,
     {{"out", Role::kOutput},
      {"x", Role::kRootInput},
      kRootParameter,
      kCountsParameter,
      kAsyncParameter,
      kAlgorithmParameter,
      kWireParameter,
      kStreamParameter},
     docs::kScatter},
    {OpKind::kSend,
     2,
     {{"x", Role::kInput},
      {"dst", Role::kRoot},
      kAsyncParameter,
      kStreamParameter,
      {"tag", Role::kTag}},
     docs::kSend},
    {OpKind::kRecv,
     1,
     {{"x", Role::kOutput},
      {"src", Role::kRoot},
      kAsyncParameter,
      kStreamParameter,
      {"tag", Role::kTag}},
     docs::kRecv},
    {OpKind::kBarrier, 0, {kAsyncParameter}, docs::kBarrier},
};

// Gives the call the program of the algorithm that was asked for; none where it is left open. False
// with a Python error set.
bool choose_program(CommunicatorObject& self, PyObject* algorithm, Call& call) {
  if (algorithm == nullptr || algorithm == Py_None) return true;
  Py_ssize_t length = 0;
  const char* text =
      PyUnicode_Check(algorithm) ? PyUnicode_AsUTF8AndSize(algorithm, &length) : nullptr;
  if (text == nullptr) {
    if (PyErr_Occurred() == nullptr)
      raise_configuration_error("algorithm %R is not the name of one", algorithm);
    return false;
  }
  const std::string_view name(text, static_cast<std::size_t>(length));
  if (name == "auto") return true;  // chosen by the core
  if (name == "direct" && (*self.core)->group().messenger() == nullptr) {
    call.use(Communicator::direct_paths());
    return true;
  }
  try {
    call.use((*self.core)->plans()->of(call.request().kind, name, call.request().root));
  } catch (...) {
    raise_current_exception();
    return false;
  }
  return true;
}

// Where messages to other hosts may outlive the call.
void keep_arrays(CommunicatorObject& self, Call& call) {
  if ((*self.core)->group().messenger() == nullptr) return;
  (*self.kept)->sweep();
  call.keep_with(**self.kept);
}

PyObject* run_now(CommunicatorObject& self, OpKind kind, const CallArguments& arguments) {
  Communicator& core = **self.core;
  Call call;
  if (!call.prepare(kind, arguments, core.rank(), core.size()) ||
      !choose_program(self, arguments.algorithm, call))
    return nullptr;
  keep_arrays(self, call);
  try {
    const GilReleased unlocked;
    core.run(call.request(), python_interrupts());
  } catch (const std::exception&) {
    raise_current_exception();
    return nullptr;
  }
  if (!call.finish()) return nullptr;
  if (kind == OpKind::kRecv) return PyLong_FromLong(call.source());
  PyObject* result = arguments.result(kind);
  Py_INCREF(result);
  return result;
}

PyObject* start_async(CommunicatorObject& self, OpKind kind, const CallArguments& arguments) {
  Communicator& core = **self.core;
  try {
    auto call = std::make_unique<Call>();
    if (!call->prepare(kind, arguments, core.rank(), core.size()) ||
        !choose_program(self, arguments.algorithm, *call))
      return nullptr;
    keep_arrays(self, *call);
    (*self.abandoned)->sweep();
    std::shared_ptr<Work> work;
    {
      const GilReleased unlocked;
      work = core.submit(call->request(), nullptr);
    }
    return py::cast(std::make_unique<PythonWork>(
                        std::move(call), std::move(work), *self.abandoned,
                        py::reinterpret_borrow<py::object>(arguments.result(kind))))
        .release()
        .ptr();
  } catch (const std::exception&) {
    raise_current_exception();
    return nullptr;
  }
}

// What a method's arguments mean on this rank. False with a Python error set.
template <std::size_t Index>
bool interpret(const MethodArguments<kMostParameters>& given, int rank, CallArguments& call,
               bool& async) {
  constexpr const Method& method = kMethods[Index];
  for (std::size_t i = 0; i < kMostParameters; ++i) switch (method.parameters[i].role) {
      case Role::kRoot:
        if (method.kind == OpKind::kRecv && !given.has(i))
          call.from_any = true;
        else if (!given.integer(i, call.root))
          return false;
        break;
      case Role::kTag:
        if (!given.integer(i, call.tag)) return false;
        break;
      default:
        break;
    }
  const bool root = call.root == rank;
  for (std::size_t i = 0; i < kMostParameters; ++i) {
    switch (method.parameters[i].role) {
      case Role::kInput:
        call.input = given[i];
        break;
      case Role::kOutput:
        if (given.has(i)) call.output = given[i];
        break;
      case Role::kInPlace:
        call.input = call.output = given[i];
        break;
      case Role::kRootSends:
        // The root only reads: a read-only array may be broadcast.
        (root ? call.input : call.output) = given[i];
        break;
      case Role::kRootInput:
      case Role::kRootOutput:
        if (!root) break;
        if (!given.has(i)) {
          raise_configuration_error("%s: the root needs the array '%s'", name_of(method.kind),
                                    method.parameters[i].name);
          return false;
        }
        (method.parameters[i].role == Role::kRootInput ? call.input : call.output) = given[i];
        break;
      case Role::kOp:
        call.op = given[i];
        break;
      case Role::kCounts:
        call.counts = given[i];
        break;
      case Role::kAsync:
        if (!given.flag(i, async)) return false;
        break;
      case Role::kAlgorithm:
        call.algorithm = given[i];
        break;
      case Role::kWire:
        call.wire = given[i];
        break;
      case Role::kStream:
        call.stream = given[i];
        break;
      case Role::kRoot:
      case Role::kTag:
      case Role::kNone:
        break;
    }
  }
  if (traits_of(method.kind).output.who == Who::kRoot && !root) call.output = nullptr;
  return true;
}

template <std::size_t Index>
PyObject* method(PyObject* self, PyObject* const* args, Py_ssize_t positional, PyObject* names) {
  constexpr const Method& method = kMethods[Index];
  static constexpr const char* kNames[kMostParameters] = {
      method.parameters[0].name, method.parameters[1].name, method.parameters[2].name,
      method.parameters[3].name, method.parameters[4].name, method.parameters[5].name,
      method.parameters[6].name, method.parameters[7].name};
  Communicator* core = CommunicatorObject::core_of(self);
  MethodArguments<kMostParameters> given(name_of(method.kind), kNames, method.required);
  CallArguments call;
  bool async = false;
  if (core == nullptr || !given.read(args, positional, names) ||
      !interpret<Index>(given, core->rank(), call, async))
    return nullptr;
  CommunicatorObject& object = CommunicatorObject::of(self);
  return async ? start_async(object, method.kind, call) : run_now(object, method.kind, call);
}

template <std::size_t Index>
constexpr PyMethodDef definition() {
  return {name_of(kMethods[Index].kind),
          reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&method<Index>)),
          METH_FASTCALL | METH_KEYWORDS, kMethods[Index].doc};
}

}  // namespace

const PyMethodDef collective_methods[kCollectiveMethods] = {
    definition<0>(), definition<1>(), definition<2>(), definition<3>(),
    definition<4>(), definition<5>(), definition<6>(), definition<7>(),
    definition<8>(), definition<9>(), definition<10>()};

}  // namespace pycollective
