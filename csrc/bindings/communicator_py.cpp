#include <pybind11/stl.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "bindings/call.h"
#include "bindings/gil.h"
#include "bindings/objects.h"

namespace py = pybind11;

namespace pycollective {
namespace {

using Object = CommunicatorObject;

// Of Communicator::allocate().
struct SharedMemory {
  std::shared_ptr<std::byte> memory;
  std::size_t bytes;
};

// Asks pycollective.host_memory; a plain function, so that ending a communicator needs no GIL.
void check_room(const char* call, std::size_t bytes, int ranks) {
  const GilHeld gil;
  try {
    py::module_::import("pycollective.host_memory").attr("check")(bytes, ranks);
  } catch (py::error_already_set& error) {
    const std::string why = std::string(call) + ": " + py::str(error.value()).cast<std::string>();
    if (error.matches(py::module_::import("pycollective.errors").attr("ConfigurationError")))
      throw CollectiveFailure(Failure::of_no_operation(FailureKind::kConfiguration, -1, why));
    error.restore();  // what a signal's handler raises, say: raise_current_exception() leaves it
    throw CollectiveFailure(Failure::of_no_operation(FailureKind::kAborted, -1, why));
  }
}

Communicator* core_of(PyObject* self) { return Object::core_of(self); }

PyObject* abort(PyObject* self, PyObject* args, PyObject* names) {
  const char* reason = "abort() was called";
  static const char* parameters[] = {"reason", nullptr};
  Communicator* core = core_of(self);
  if (core == nullptr || !PyArg_ParseTupleAndKeywords(args, names, "|s:abort",
                                                      const_cast<char**>(parameters), &reason))
    return nullptr;
  {
    const GilReleased unlocked;
    core->abort(reason);
  }
  Py_RETURN_NONE;
}

PyObject* close(PyObject* self, PyObject*) {
  Communicator* core = core_of(self);
  if (core == nullptr) return nullptr;
  try {
    const GilReleased unlocked;
    core->close(python_interrupts());
  } catch (const std::exception&) {
    core->forget_sources();
    raise_current_exception();
    return nullptr;
  }
  // Here, on a thread that has the interpreter: the last to let go of the core may be the progress
  // thread, when there is none any more.
  core->forget_sources();
  (*Object::of(self).abandoned)->sweep();
  (*Object::of(self).kept)->sweep();
  Py_RETURN_NONE;
}

PyObject* check_peers(PyObject* self, PyObject*) {
  Communicator* core = core_of(self);
  if (core == nullptr) return nullptr;
  try {
    const GilReleased unlocked;
    core->check_peers();
  } catch (const std::exception&) {
    raise_current_exception();
    return nullptr;
  }
  Py_RETURN_NONE;
}

PyObject* gone(PyObject* self, PyObject*) {
  Communicator* core = core_of(self);
  if (core == nullptr) return nullptr;
  std::vector<int> ranks;
  {
    const GilReleased unlocked;
    ranks = core->gone();
  }
  return py::cast(ranks).release().ptr();
}

PyObject* stats(PyObject* self, PyObject*) {
  Communicator* core = core_of(self);
  if (core == nullptr) return nullptr;
  Messenger::Traffic sent;
  const Messenger* messenger = core->group().messenger();
  if (messenger != nullptr && !core->forked()) {  // in a fork its lock may be held for ever
    const GilReleased unlocked;
    sent = messenger->sent();
  }
  const auto number = [](std::uint64_t value) { return static_cast<unsigned long long>(value); };
  return Py_BuildValue("{sKsKsK}", "sent_messages", number(sent.messages), "sent_bytes",
                       number(sent.bytes), "sent_raw_bytes", number(sent.raw_bytes));
}

PyObject* allocate(PyObject* self, PyObject* bytes) {
  Communicator* core = core_of(self);
  const std::size_t size = core != nullptr ? PyLong_AsSize_t(bytes) : 0;
  if (PyErr_Occurred()) return nullptr;
  try {
    std::shared_ptr<std::byte> memory;
    {
      const GilReleased unlocked;
      memory = core->allocate(size);
    }
    return py::cast(SharedMemory{std::move(memory), size}).release().ptr();
  } catch (const std::exception&) {
    raise_current_exception();
    return nullptr;
  }
}

PyObject* capsule(PyObject* self, PyObject*) {
  if (core_of(self) == nullptr) return nullptr;
  auto* shared = new std::shared_ptr<Collectives>(*Object::of(self).core);
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
  if (!(seconds > 0) || !std::isfinite(seconds)) {
    raise_configuration_error("timeout must be a finite number of seconds above 0");
    return -1;
  }
  core->set_timeout(seconds);
  return 0;
}
PyObject* get_wire(PyObject* self, void*) {
  return property(self, [](Communicator& core) -> PyObject* {
    for (const WireTraits& row : kWireTable)
      if (row.wire == core.wire()) return PyUnicode_FromString(row.name);
    Py_RETURN_NONE;
  });
}
int set_wire(PyObject* self, PyObject* value, void*) {
  Communicator* core = core_of(self);
  Wire wire = Wire::kRaw;
  if (core == nullptr || !read_wire(value != nullptr ? value : Py_None, wire)) return -1;
  core->set_wire(wire);
  return 0;
}
PyObject* get_closed(PyObject* self, void*) {
  return property(self, [](Communicator& core) { return PyBool_FromLong(core.closed()); });
}
PyObject* get_pending(PyObject* self, void*) {
  return property(self, [](Communicator& core) { return PyBool_FromLong(core.busy()); });
}
PyObject* get_kernel_calls(PyObject* self, void*) {
  return property(self, [](Communicator& core) {
    return PyLong_FromUnsignedLongLong(core.device() ? core.device()->launches() : 0);
  });
}
PyObject* get_failure(PyObject* self, void*) {
  return property(self, [](Communicator& core) -> PyObject* {
    std::shared_ptr<const Failure> failure;
    {
      const GilReleased unlocked;  // a GPU may have to be told of it
      failure = core.failure();
    }
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
    if (tuple.size() != 7 || (names != nullptr && PyDict_GET_SIZE(names) != 0)) {
      PyErr_SetString(PyExc_TypeError,
                      "Communicator(node, rank, tokens, offsets, data_bytes, timeout, world)");
      return -1;
    }
    auto& node = tuple[0].cast<NodeHandle&>();
    const int member = tuple[1].cast<int>();
    std::vector<Token> tokens;
    for (const auto& token : tuple[2].cast<std::vector<std::string>>())
      tokens.push_back(token_from_bytes(token));
    const auto offsets = tuple[3].cast<std::vector<std::size_t>>();
    const auto data_bytes = tuple[4].cast<std::size_t>();
    const auto timeout = tuple[5].cast<double>();
    if (member < 0 || static_cast<std::size_t>(member) >= offsets.size() || !(timeout > 0))
      throw std::invalid_argument("a communicator needs its rank's offset and a timeout above 0");
    const MailboxRange mailbox = node.take(offsets[static_cast<std::size_t>(member)]);
    // pycollective.planning.world.World
    const py::object given = tuple[6];
    World world;
    world.id = given.attr("id").cast<std::uint64_t>();
    world.rank = given.attr("rank").cast<int>();
    world.size = given.attr("size").cast<int>();
    world.local_ranks = given.attr("local_ranks").cast<std::vector<int>>();
    world.on_machine = given.attr("on_machine").cast<int>();
    if (!given.attr("link").is_none()) world.link = link_in(given.attr("link"));
    auto group = std::make_unique<Group>(node.node, Member(member), tokens, offsets, mailbox,
                                         data_bytes, std::move(world));
    Object* object = &Object::of(self);
    if (object->core != nullptr) throw std::invalid_argument("initialised twice");
    object->core = new std::shared_ptr<Communicator>(
        std::make_shared<Communicator>(std::move(group), node.progress, timeout));
    (*object->core)->set_memory_check(&check_room);
    remember(*object->core);
    // On one host without a table there is nothing to choose, and calls ask nobody.
    (*object->core)
        ->plans()
        ->set_source(plan_source(given.attr("planner"), given.attr("chooses").cast<bool>()));
    object->kept = new std::shared_ptr<KeptArrays>(std::make_shared<KeptArrays>());
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
  Object* object = &Object::of(self);
  PyTypeObject* type = Py_TYPE(self);
  delete object->abandoned;
  if (object->core != nullptr) {
    // Operations may be pending: the thread that ends the last of them also ends the core, and
    // may not need the interpreter for it.
    (*object->core)->forget_sources();
    // The last share of a communicator may join the progress thread.
    const GilReleased unlocked;
    delete object->core;
  }
  if (object->kept != nullptr) (*object->kept)->sweep();
  delete object->kept;
  type->tp_free(self);
  Py_DECREF(type);
}

// The collectives' first; the interpreter keeps pointers into this.
PyMethodDef methods[kCollectiveMethods + 9] = {};

const PyMethodDef own_methods[] = {
    {"abort", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(abort)),
     METH_VARARGS | METH_KEYWORDS,
     "abort($self, reason='abort() was called')\n--\n\n"
     "Fail the group on every rank; needs no peer.\n\n"
     "Calls that are under way, and later ones, raise CollectiveAborted on all ranks.\n\n"
     "Args:\n    reason: what the error says."},
    {"stats", stats, METH_NOARGS,
     "stats($self)\n--\n\n"
     "Count what this rank has sent to other hosts so far.\n\n"
     "Returns:\n"
     "    ``sent_messages``; ``sent_bytes``, payloads as they left, with the library's headers,\n"
     "    without the transport's; ``sent_raw_bytes``, what they would have been unpacked."},
    {"_check_peers", check_peers, METH_NOARGS, nullptr},
    {"_gone", gone, METH_NOARGS, nullptr},
    {"_close", close, METH_NOARGS, nullptr},
    {"_capsule", capsule, METH_NOARGS, nullptr},
    {"_allocate", allocate, METH_O, nullptr},
    {"_reduce_leaves", reduce_leaves, METH_O, nullptr},
};

PyGetSetDef properties[] = {
    {"rank", get_rank, nullptr, "The number of this rank, 0 to size - 1.", nullptr},
    {"size", get_size, nullptr, "Number of ranks.", nullptr},
    {"timeout", get_timeout, set_timeout, "Seconds that an operation may take.", nullptr},
    {"wire", get_wire, set_wire,
     "How data go to other hosts where a call leaves it open, 'raw' or 'exact' (packed, the same "
     "bits). The same on all ranks.",
     nullptr},
    {"closed", get_closed, nullptr, "Whether close() was called.", nullptr},
    {"pending", get_pending, nullptr, "Whether operations are under way, in any thread.", nullptr},
    {"kernel_calls", get_kernel_calls, nullptr,
     "Calls so far that kernels on this rank's GPU carry out, those of captures included.",
     nullptr},
    {"failure", get_failure, nullptr, "The error that failed this communicator, or None.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_init, reinterpret_cast<void*>(initialise)},
    {Py_tp_dealloc, reinterpret_cast<void*>(finalise)},
    {Py_tp_methods, methods},
    {Py_tp_getset, properties},
    {0, nullptr},
};

PyType_Spec spec = {"pycollective._core.Communicator", sizeof(CommunicatorObject), 0,
                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, slots};

}  // namespace

void bind_communicator(py::module_& module) {
  py::class_<SharedMemory>(module, "SharedMemory", py::is_final(), py::buffer_protocol(),
                           "Memory that ranks of this host read in place: a buffer of bytes.")
      .def_buffer([](const SharedMemory& self) {
        return py::buffer_info(reinterpret_cast<std::uint8_t*>(self.memory.get()),
                               static_cast<py::ssize_t>(self.bytes));
      });
  std::copy(std::begin(collective_methods), std::end(collective_methods), methods);
  std::copy(std::begin(own_methods), std::end(own_methods), methods + kCollectiveMethods);
  module.attr("Communicator") = py::reinterpret_steal<py::object>(PyType_FromSpec(&spec));
}

}  // namespace pycollective
