#include "bindings/communicator_py.h"

#include <pybind11/stl.h>

#include <structmember.h>

#include <memory>
#include <string>
#include <vector>

#include "bindings/call.h"
#include "bindings/errors_py.h"
#include "bindings/method_arguments.h"
#include "bindings/node_py.h"
#include "bindings/work_py.h"
#include "engine/communicator.h"

namespace py = pybind11;

// The type is written against CPython's own API rather than pybind11's: a small all-reduce takes
// 0.3 us, and pybind11's dispatch alone would add as much again.

namespace pycollective {
namespace {

struct Object {
  PyObject_HEAD std::shared_ptr<Communicator>* core;
  std::shared_ptr<AbandonedCalls>* abandoned;
};

Object* self_of(PyObject* self) { return reinterpret_cast<Object*>(self); }

Communicator* core_of(PyObject* self) {
  Object* object = self_of(self);
  if (object->core == nullptr) {
    raise_configuration_error("the communicator was never initialised");
    return nullptr;
  }
  return object->core->get();
}

PyObject* run_now(Communicator& core, OpKind kind, const CallArguments& arguments) {
  Call call;
  if (!call.prepare(kind, arguments, core.rank(), core.size())) return nullptr;
  PyThreadState* unlocked = PyEval_SaveThread();
  try {
    core.run(call.request(), python_interrupts());
  } catch (...) {
    PyEval_RestoreThread(unlocked);
    raise_current_exception();
    return nullptr;
  }
  PyEval_RestoreThread(unlocked);
  if (!call.finish()) return nullptr;
  Py_RETURN_NONE;
}

PyObject* start_async(Object& self, OpKind kind, const CallArguments& arguments) {
  Communicator& core = **self.core;
  try {
    auto call = std::make_unique<Call>();
    if (!call->prepare(kind, arguments, core.rank(), core.size())) return nullptr;
    (*self.abandoned)->sweep();
    std::shared_ptr<Work> work;
    {
      const py::gil_scoped_release unlocked;
      work = core.submit(call->request(), nullptr);
    }
    return py::cast(std::make_unique<PythonWork>(std::move(call), std::move(work), *self.abandoned))
        .release()
        .ptr();
  } catch (...) {
    raise_current_exception();
    return nullptr;
  }
}

PyObject* collective(PyObject* self, OpKind kind, const CallArguments& arguments, bool async) {
  Communicator* core = core_of(self);
  if (core == nullptr) return nullptr;
  return async ? start_async(*self_of(self), kind, arguments) : run_now(*core, kind, arguments);
}

// The methods. Each names its parameters in order; `from` says which of them the call reads.

constexpr const char* kAllReduceDoc =
    "all_reduce(x, op='sum', out=None, async_op=False, algorithm='auto')\n--\n\n"
    "Reduce x over all ranks in the contract's order; the result goes to x, or to out.";
PyObject* all_reduce(PyObject* self, PyObject* const* args, Py_ssize_t n, PyObject* names) {
  static const char* const parameters[] = {"x", "op", "out", "async_op", "algorithm"};
  MethodArguments<5> given("all_reduce", parameters, 1);
  bool async = false;
  if (!given.read(args, n, names) || !given.flag(3, async)) return nullptr;
  CallArguments call;
  call.input = given[0];
  call.output = given.has(2) ? given[2] : given[0];
  call.op = given[1];
  call.algorithm = given[4];
  return collective(self, OpKind::kAllReduce, call, async);
}

constexpr const char* kReduceDoc =
    "reduce(x, root=0, op='sum', out=None, async_op=False, algorithm='auto')\n--\n\n"
    "Reduce x over all ranks; on the root the result goes to x, or to out. Elsewhere x is only "
    "read.";
PyObject* reduce(PyObject* self, PyObject* const* args, Py_ssize_t n, PyObject* names) {
  static const char* const parameters[] = {"x", "root", "op", "out", "async_op", "algorithm"};
  MethodArguments<6> given("reduce", parameters, 1);
  bool async = false;
  CallArguments call;
  if (!given.read(args, n, names) || !given.integer(1, call.root) || !given.flag(4, async))
    return nullptr;
  const Communicator* core = core_of(self);
  if (core == nullptr) return nullptr;
  call.input = given[0];
  if (core->rank() == call.root) call.output = given.has(3) ? given[3] : given[0];
  call.op = given[2];
  call.algorithm = given[5];
  return collective(self, OpKind::kReduce, call, async);
}

constexpr const char* kReduceScatterDoc =
    "reduce_scatter(out, x, op='sum', counts=None, async_op=False, algorithm='auto')\n--\n\n"
    "Reduce x, which holds one shard a rank, over all ranks; out receives the own shard. Shards "
    "are equal, or of counts[rank] elements. out may be the own shard of x.";
PyObject* reduce_scatter(PyObject* self, PyObject* const* args, Py_ssize_t n, PyObject* names) {
  static const char* const parameters[] = {"out", "x", "op", "counts", "async_op", "algorithm"};
  MethodArguments<6> given("reduce_scatter", parameters, 2);
  bool async = false;
  if (!given.read(args, n, names) || !given.flag(4, async)) return nullptr;
  CallArguments call;
  call.output = given[0];
  call.input = given[1];
  call.op = given[2];
  call.counts = given[3];
  call.algorithm = given[5];
  return collective(self, OpKind::kReduceScatter, call, async);
}

constexpr const char* kAllGatherDoc =
    "all_gather(out, x, counts=None, async_op=False, algorithm='auto')\n--\n\n"
    "out receives every rank's x, in rank order, byte for byte. Shards are equal, or of "
    "counts[rank] elements. x may be the own shard of out.";
PyObject* all_gather(PyObject* self, PyObject* const* args, Py_ssize_t n, PyObject* names) {
  static const char* const parameters[] = {"out", "x", "counts", "async_op", "algorithm"};
  MethodArguments<5> given("all_gather", parameters, 2);
  bool async = false;
  if (!given.read(args, n, names) || !given.flag(3, async)) return nullptr;
  CallArguments call;
  call.output = given[0];
  call.input = given[1];
  call.counts = given[2];
  call.algorithm = given[4];
  return collective(self, OpKind::kAllGather, call, async);
}

constexpr const char* kBroadcastDoc =
    "broadcast(x, root=0, async_op=False, algorithm='auto')\n--\n\n"
    "x receives the root's x, byte for byte.";
PyObject* broadcast(PyObject* self, PyObject* const* args, Py_ssize_t n, PyObject* names) {
  static const char* const parameters[] = {"x", "root", "async_op", "algorithm"};
  MethodArguments<4> given("broadcast", parameters, 1);
  bool async = false;
  CallArguments call;
  if (!given.read(args, n, names) || !given.integer(1, call.root) || !given.flag(2, async))
    return nullptr;
  const Communicator* core = core_of(self);
  if (core == nullptr) return nullptr;
  call.input = given[0];
  // The root only reads: a read-only array may be broadcast.
  if (core->rank() != call.root) call.output = given[0];
  call.algorithm = given[3];
  return collective(self, OpKind::kBroadcast, call, async);
}

constexpr const char* kAllToAllDoc =
    "all_to_all(out, x, async_op=False, algorithm='auto')\n--\n\n"
    "Shard r of x goes to rank r; shard r of out comes from rank r. Shards are equal. out may be "
    "x.";
PyObject* all_to_all(PyObject* self, PyObject* const* args, Py_ssize_t n, PyObject* names) {
  static const char* const parameters[] = {"out", "x", "async_op", "algorithm"};
  MethodArguments<4> given("all_to_all", parameters, 2);
  bool async = false;
  if (!given.read(args, n, names) || !given.flag(2, async)) return nullptr;
  CallArguments call;
  call.output = given[0];
  call.input = given[1];
  call.algorithm = given[3];
  return collective(self, OpKind::kAllToAll, call, async);
}

constexpr const char* kGatherDoc =
    "gather(out, x, root=0, counts=None, async_op=False, algorithm='auto')\n--\n\n"
    "The root's out receives every rank's x, in rank order. Elsewhere out is None or ignored.";
PyObject* gather(PyObject* self, PyObject* const* args, Py_ssize_t n, PyObject* names) {
  static const char* const parameters[] = {"out", "x", "root", "counts", "async_op", "algorithm"};
  MethodArguments<6> given("gather", parameters, 2);
  bool async = false;
  CallArguments call;
  if (!given.read(args, n, names) || !given.integer(2, call.root) || !given.flag(4, async))
    return nullptr;
  const Communicator* core = core_of(self);
  if (core == nullptr) return nullptr;
  if (core->rank() == call.root) {
    call.output = given[0];
    if (!given.has(0)) {
      raise_configuration_error("gather: the root needs an output array");
      return nullptr;
    }
  }
  call.input = given[1];
  call.counts = given[3];
  call.algorithm = given[5];
  return collective(self, OpKind::kGather, call, async);
}

constexpr const char* kScatterDoc =
    "scatter(out, x, root=0, counts=None, async_op=False, algorithm='auto')\n--\n\n"
    "out receives the own shard of the root's x. Elsewhere x is None or ignored.";
PyObject* scatter(PyObject* self, PyObject* const* args, Py_ssize_t n, PyObject* names) {
  static const char* const parameters[] = {"out", "x", "root", "counts", "async_op", "algorithm"};
  MethodArguments<6> given("scatter", parameters, 2);
  bool async = false;
  CallArguments call;
  if (!given.read(args, n, names) || !given.integer(2, call.root) || !given.flag(4, async))
    return nullptr;
  const Communicator* core = core_of(self);
  if (core == nullptr) return nullptr;
  call.output = given[0];
  if (core->rank() == call.root) {
    call.input = given[1];
    if (!given.has(1)) {
      raise_configuration_error("scatter: the root needs an input array");
      return nullptr;
    }
  }
  call.counts = given[3];
  call.algorithm = given[5];
  return collective(self, OpKind::kScatter, call, async);
}

constexpr const char* kSendDoc =
    "send(x, dst, async_op=False)\n--\n\n"
    "Send x to rank dst, which must call recv with as many elements of the same dtype. Done when "
    "dst has it all. Messages from one rank to another arrive in the order of the calls.";
PyObject* send(PyObject* self, PyObject* const* args, Py_ssize_t n, PyObject* names) {
  static const char* const parameters[] = {"x", "dst", "async_op"};
  MethodArguments<3> given("send", parameters, 2);
  bool async = false;
  CallArguments call;
  if (!given.read(args, n, names) || !given.integer(1, call.root) || !given.flag(2, async))
    return nullptr;
  call.input = given[0];
  return collective(self, OpKind::kSend, call, async);
}

constexpr const char* kRecvDoc =
    "recv(x, src, async_op=False)\n--\n\n"
    "Receive into x what rank src sends.";
PyObject* recv(PyObject* self, PyObject* const* args, Py_ssize_t n, PyObject* names) {
  static const char* const parameters[] = {"x", "src", "async_op"};
  MethodArguments<3> given("recv", parameters, 2);
  bool async = false;
  CallArguments call;
  if (!given.read(args, n, names) || !given.integer(1, call.root) || !given.flag(2, async))
    return nullptr;
  call.output = given[0];
  return collective(self, OpKind::kRecv, call, async);
}

constexpr const char* kBarrierDoc =
    "barrier(async_op=False)\n--\n\nReturns when every rank has called it.";
PyObject* barrier(PyObject* self, PyObject* const* args, Py_ssize_t n, PyObject* names) {
  static const char* const parameters[] = {"async_op"};
  MethodArguments<1> given("barrier", parameters, 0);
  bool async = false;
  if (!given.read(args, n, names) || !given.flag(0, async)) return nullptr;
  return collective(self, OpKind::kBarrier, {}, async);
}

PyObject* abort(PyObject* self, PyObject* args) {
  const char* reason = "abort() was called";
  Communicator* core = core_of(self);
  if (core == nullptr || !PyArg_ParseTuple(args, "|s", &reason)) return nullptr;
  const py::gil_scoped_release unlocked;
  core->abort(reason);
  Py_INCREF(Py_None);
  return Py_None;
}

PyObject* close(PyObject* self, PyObject*) {
  Communicator* core = core_of(self);
  if (core == nullptr) return nullptr;
  PyThreadState* unlocked = PyEval_SaveThread();
  try {
    if (!core->forked() && !core->closed()) core->drain(python_interrupts());
    core->close();
  } catch (...) {
    PyEval_RestoreThread(unlocked);
    raise_current_exception();
    return nullptr;
  }
  PyEval_RestoreThread(unlocked);
  (*self_of(self)->abandoned)->sweep();
  Py_RETURN_NONE;
}

PyObject* capsule(PyObject* self, PyObject*) {
  if (core_of(self) == nullptr) return nullptr;
  auto* shared = new std::shared_ptr<Collectives>(*self_of(self)->core);
  return PyCapsule_New(shared, kCapsuleName, [](PyObject* object) {
    delete static_cast<std::shared_ptr<Collectives>*>(PyCapsule_GetPointer(object, kCapsuleName));
  });
}

template <class Get>
PyObject* property(PyObject* self, const Get& get) {
  Communicator* core = core_of(self);
  return core == nullptr ? nullptr : get(*core);
}

PyObject* get_rank(PyObject* self, void*) {
  return property(self, [](Communicator& core) { return PyLong_FromLong(core.rank()); });
}
PyObject* get_size(PyObject* self, void*) {
  return property(self, [](Communicator& core) { return PyLong_FromLong(core.size()); });
}
PyObject* get_timeout(PyObject* self, void*) {
  return property(self, [](Communicator& core) { return PyFloat_FromDouble(core.timeout()); });
}
int set_timeout(PyObject* self, PyObject* value, void*) {
  Communicator* core = core_of(self);
  if (core == nullptr) return -1;
  const double seconds = value != nullptr ? PyFloat_AsDouble(value) : 0;
  if (PyErr_Occurred()) return -1;
  if (!(seconds > 0)) {
    raise_configuration_error("timeout must be a number of seconds above 0");
    return -1;
  }
  core->set_timeout(seconds);
  return 0;
}
PyObject* get_closed(PyObject* self, void*) {
  return property(self, [](Communicator& core) { return PyBool_FromLong(core.closed()); });
}
PyObject* get_pending(PyObject* self, void*) {
  return property(self, [](Communicator& core) { return PyBool_FromLong(core.has_pending()); });
}
PyObject* get_failure(PyObject* self, void*) {
  return property(self, [](Communicator& core) -> PyObject* {
    const std::shared_ptr<const Failure> failure = core.failure();
    if (!failure) Py_RETURN_NONE;
    raise_failure(*failure);
    PyObject* type = nullptr;
    PyObject* value = nullptr;
    PyObject* traceback = nullptr;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    Py_XDECREF(type);
    Py_XDECREF(traceback);
    return value;
  });
}

int initialise(PyObject* self, PyObject* args, PyObject* names) {
  try {
    const auto tuple = py::reinterpret_borrow<py::tuple>(args);
    if (tuple.size() != 6 || (names != nullptr && PyDict_GET_SIZE(names) != 0)) {
      PyErr_SetString(PyExc_TypeError,
                      "Communicator(node, rank, tokens, offsets, slot_bytes, timeout)");
      return -1;
    }
    auto& node = tuple[0].cast<NodeHandle&>();
    const int rank = tuple[1].cast<int>();
    std::vector<Token> tokens;
    for (const auto& token : tuple[2].cast<std::vector<std::string>>())
      tokens.push_back(token_from_bytes(token));
    const auto offsets = tuple[3].cast<std::vector<std::size_t>>();
    const auto slot_bytes = tuple[4].cast<std::size_t>();
    const auto timeout = tuple[5].cast<double>();
    if (rank < 0 || static_cast<std::size_t>(rank) >= offsets.size() || !(timeout > 0))
      throw std::invalid_argument("a communicator needs its rank's offset and a timeout above 0");
    const MailboxRange mailbox = node.take(offsets[static_cast<std::size_t>(rank)]);
    auto group = std::make_unique<Group>(node.node, rank, tokens, offsets, mailbox, slot_bytes);
    Object* object = self_of(self);
    if (object->core != nullptr) throw std::invalid_argument("initialised twice");
    object->core = new std::shared_ptr<Communicator>(
        std::make_shared<Communicator>(std::move(group), node.progress, timeout));
    object->abandoned = new std::shared_ptr<AbandonedCalls>(std::make_shared<AbandonedCalls>());
    return 0;
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const py::cast_error& error) {
    PyErr_SetString(PyExc_TypeError, error.what());
  } catch (...) {
    raise_current_exception();
  }
  return -1;
}

void finalise(PyObject* self) {
  Object* object = self_of(self);
  PyTypeObject* type = Py_TYPE(self);
  delete object->abandoned;
  if (object->core != nullptr) {
    // The last share of a communicator may join the progress thread.
    const py::gil_scoped_release unlocked;
    delete object->core;
  }
  type->tp_free(self);
  Py_DECREF(type);
}

#define FAST(function)                                                   \
  reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)), \
      METH_FASTCALL | METH_KEYWORDS

PyMethodDef methods[] = {
    {"all_reduce", FAST(all_reduce), kAllReduceDoc},
    {"reduce", FAST(reduce), kReduceDoc},
    {"reduce_scatter", FAST(reduce_scatter), kReduceScatterDoc},
    {"all_gather", FAST(all_gather), kAllGatherDoc},
    {"broadcast", FAST(broadcast), kBroadcastDoc},
    {"all_to_all", FAST(all_to_all), kAllToAllDoc},
    {"gather", FAST(gather), kGatherDoc},
    {"scatter", FAST(scatter), kScatterDoc},
    {"send", FAST(send), kSendDoc},
    {"recv", FAST(recv), kRecvDoc},
    {"barrier", FAST(barrier), kBarrierDoc},
    {"abort", abort, METH_VARARGS,
     "abort(reason='abort() was called')\n--\n\nFail the group on every rank; needs no peer."},
    {"_close", close, METH_NOARGS, nullptr},
    {"_capsule", capsule, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyGetSetDef properties[] = {
    {"rank", get_rank, nullptr, "This rank: 0 to size - 1.", nullptr},
    {"size", get_size, nullptr, "Number of ranks.", nullptr},
    {"timeout", get_timeout, set_timeout, "Seconds that an operation may take.", nullptr},
    {"closed", get_closed, nullptr, "Whether close() was called.", nullptr},
    {"pending", get_pending, nullptr, "Whether asynchronous operations are under way.", nullptr},
    {"failure", get_failure, nullptr, "The error that failed this communicator, or None.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyMemberDef members[] = {{nullptr, 0, 0, 0, nullptr}};

PyType_Slot slots[] = {
    {Py_tp_init, reinterpret_cast<void*>(initialise)},
    {Py_tp_dealloc, reinterpret_cast<void*>(finalise)},
    {Py_tp_methods, methods},
    {Py_tp_getset, properties},
    {Py_tp_members, members},
    {0, nullptr},
};

PyType_Spec spec = {"pycollective._core.Communicator", sizeof(Object), 0,
                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, slots};

}  // namespace

void bind_communicator(py::module_& module) {
  module.attr("Communicator") = py::reinterpret_steal<py::object>(PyType_FromSpec(&spec));
}

}  // namespace pycollective
