// The collectives as Python methods, from one table: what each parameter of each method means.
//
// They are written against CPython's own API rather than pybind11's: a small all-reduce takes
// 0.2 us, and pybind11's dispatch alone would add twice as much.
#include <array>
#include <climits>
#include <cstddef>
#include <optional>
#include <string_view>
#include <utility>

#include "bindings/call.h"
#include "bindings/gil.h"
#include "bindings/objects.h"

namespace py = pybind11;

namespace pycollective {
namespace {

// What help() says of each collective: its signature, as inspect reads it, and its docstring.
// "The class" is pycollective.Communicator, which says what calls have in common.
namespace docs {

constexpr const char* kAllReduce =
    R"(all_reduce($self, x, op='sum', out=None, async_op=False, algorithm='auto', wire=None, stream=None)
--

Reduce the arrays of all ranks; every rank gets the result, the same bits.

Every algorithm can do it. ``op``, ``async_op``, ``algorithm``, ``wire`` and ``stream``: see
`Communicator`.

Args:
    x: this rank's array, of one shape and dtype on all ranks. It receives the result unless ``out``
        is given; then it is only read. Or a `pycollective.Accumulator`, see the class.
    out: of x's shape and dtype, apart from x; or x itself.

Returns:
    The array that holds the result, x or out. With async_op=True a Work.)";

constexpr const char* kReduce =
    R"(reduce($self, x, root=0, op='sum', out=None, async_op=False, algorithm='auto', wire=None, stream=None)
--

Reduce the arrays of all ranks; the root alone gets the result.

Algorithms: ``"direct"``, ``"tree"``. ``op``, ``async_op``, ``algorithm``, ``wire`` and ``stream``:
see `Communicator`.

Args:
    x: this rank's array, of one shape and dtype on all ranks. On the root it receives the result
        unless ``out`` is given; elsewhere it is only read. Or a `pycollective.Accumulator`, see the
        class.
    root: the rank that gets the result; the same on all ranks.
    out: on the root as `all_reduce` takes it; ignored elsewhere.

Returns:
    On the root the array that holds the result, x or out. Elsewhere None. With async_op=True a
    Work.)";

constexpr const char* kReduceScatter =
    R"(reduce_scatter($self, out, x, op='sum', counts=None, async_op=False, algorithm='auto', wire=None, stream=None)
--

Reduce the arrays of all ranks; each rank gets its own shard of the result.

Every algorithm can do it but ``"recursive_doubling"``. ``op``, ``async_op``, ``algorithm``,
``wire`` and ``stream``: see `Communicator`.

Args:
    out: receives this rank's shard: 1/size of x's elements, or counts[rank], in any shape. It may
        be that shard of x.
    x: this rank's array, of one number of elements and dtype on all ranks: a shard for each rank,
        one after another in rank order. It is only read. Or a `pycollective.Accumulator`, see
        the class.
    counts: elements of each rank's shard, the same on all ranks; None where shards are equal.

Returns:
    out. With async_op=True a Work.)";

constexpr const char* kAllGather =
    R"(all_gather($self, out, x, counts=None, async_op=False, algorithm='auto', wire=None, stream=None)
--

Collect the arrays of all ranks; every rank gets all of them, byte for byte.

Every algorithm can do it. ``async_op``, ``algorithm``, ``wire`` and ``stream``: see `Communicator`.

Args:
    out: receives every rank's x, one after another in rank order: size times x's elements, or the
        sum of counts, in any shape.
    x: this rank's array, its shard of out; of as many elements on all ranks, or of counts[rank].
        It is only read, and may be that shard of out.
    counts: see `reduce_scatter`.

Returns:
    out. With async_op=True a Work.)";

constexpr const char* kBroadcast =
    R"(broadcast($self, x, root=0, async_op=False, algorithm='auto', wire=None, stream=None)
--

Give every rank the root's array, byte for byte.

Algorithms: ``"direct"``, ``"tree"``. ``async_op``, ``algorithm``, ``wire`` and ``stream``: see
`Communicator`.

Args:
    x: of as many elements and one dtype on all ranks. On the root it is only read; elsewhere it
        receives the root's.
    root: the rank that sends; the same on all ranks.

Returns:
    x, on every rank. With async_op=True a Work.)";

constexpr const char* kAllToAll =
    R"(all_to_all($self, out, x, async_op=False, algorithm='auto', wire=None, stream=None)
--

Send shard r of x to each rank r, byte for byte.

Algorithm: ``"direct"``. ``async_op``, ``algorithm``, ``wire`` and ``stream``: see `Communicator`.

Args:
    out: receives a shard of each rank, one after another in rank order; as many elements as x. It
        may be x.
    x: a shard for each rank, in rank order, all of one size: a multiple of the number of ranks;
        the same on all ranks. It is only read, unless it is out.

Returns:
    out. With async_op=True a Work.)";

constexpr const char* kGather =
    R"(gather($self, out, x, root=0, counts=None, async_op=False, algorithm='auto', wire=None, stream=None)
--

Collect the arrays of all ranks; the root alone gets them, byte for byte.

Algorithms: ``"direct"``, ``"tree"``. ``async_op``, ``algorithm``, ``wire`` and ``stream``: see
`Communicator`.

Args:
    out: on the root as `all_gather` takes it; elsewhere None, or ignored.
    x: as `all_gather` takes it.
    root: the rank that receives; the same on all ranks.
    counts: see `reduce_scatter`.

Returns:
    out on the root, None elsewhere. With async_op=True a Work.)";

constexpr const char* kScatter =
    R"(scatter($self, out, x, root=0, counts=None, async_op=False, algorithm='auto', wire=None, stream=None)
--

Give each rank its own shard of the root's array, byte for byte.

Algorithms: ``"direct"``, ``"tree"``. ``async_op``, ``algorithm``, ``wire`` and ``stream``: see
`Communicator`.

Args:
    out: receives this rank's shard: 1/size of x's elements, or counts[rank], in any shape.
    x: on the root a shard for each rank, one after another in rank order; it is only read.
        Elsewhere None, or ignored.
    root: the rank that sends; the same on all ranks.
    counts: see `reduce_scatter`.

Returns:
    out, on every rank. With async_op=True a Work.)";

constexpr const char* kSend = R"(send($self, x, dst, async_op=False, stream=None, tag=0)
--

Send an array to one rank, byte for byte; done when that rank has it all.

Messages of one tag from one rank to another arrive in the order of the calls; those of other tags
do not wait for them.

``async_op`` and ``stream``: see `Communicator`.

Args:
    x: any shape; the receiver's array has as many elements of the same dtype. It is only read.
    dst: the rank that receives; not this one.
    tag: 0 to 2**31 - 1; the receiver's is the same.

Returns:
    None. With async_op=True a Work.

Raises:
    CollectiveMismatch: the receiver's array has another dtype or number of elements.)";

constexpr const char* kRecv = R"(recv($self, x, src=None, async_op=False, stream=None, tag=0)
--

Receive into x what one rank sends with this tag.

``async_op`` and ``stream``: see `Communicator`.

Args:
    x: any shape; as many elements of the same dtype as the sender's.
    src: the rank that sends; None (`pycollective.ANY_SOURCE`) for the first message of the tag
        from any other rank.
    tag: as `send` takes it.

Returns:
    The rank that sent the message. With async_op=True a Work.

Raises:
    CollectiveMismatch: the sender's array has another dtype or number of elements.
    CollectiveAborted: this rank closed the communicator, and no message had come from any rank.)";

constexpr const char* kBarrier = R"(barrier($self, async_op=False)
--

Wait until every rank has called it.

Returns:
    None. With async_op=True a Work.)";

}  // namespace docs

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
  if (name == "auto") return true;          // chosen by the core
  if ((*self.core)->forked()) return true;  // the call is refused; a lock may be held for ever
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

}  // namespace

PyObject* run_prepared(CommunicatorObject& self, Call& call, PyObject* result) {
  Communicator& core = **self.core;
  keep_arrays(self, call);
  try {
    // To release the lock and take it again costs as much as the rest of a small call.
    std::optional<GilReleased> unlocked;
    core.run(call.request(), python_interrupts(), [&] {
      if (!unlocked) unlocked.emplace();
    });
  } catch (const std::exception&) {
    raise_current_exception();
    return nullptr;
  }
  if (!call.finish()) return nullptr;
  if (call.request().kind == OpKind::kRecv) return PyLong_FromLong(call.source());
  return Py_NewRef(result);
}

PyObject* start_prepared(CommunicatorObject& self, std::unique_ptr<Call> call, PyObject* result) {
  Communicator& core = **self.core;
  try {
    keep_arrays(self, *call);
    (*self.abandoned)->sweep();
    std::shared_ptr<Work> work;
    {
      const GilReleased unlocked;
      work = core.submit(call->request(), nullptr);
    }
    return py::cast(std::make_unique<PythonWork>(std::move(call), std::move(work), *self.abandoned,
                                                 py::reinterpret_borrow<py::object>(result)))
        .release()
        .ptr();
  } catch (const std::exception&) {
    raise_current_exception();
    return nullptr;
  }
}

namespace {

PyObject* run_now(CommunicatorObject& self, OpKind kind, const CallArguments& arguments) {
  Communicator& core = **self.core;
  Call call;
  if (!call.prepare(kind, arguments, core.rank(), core.size()) ||
      !choose_program(self, arguments.algorithm, call))
    return nullptr;
  return run_prepared(self, call, arguments.result(kind));
}

PyObject* start_async(CommunicatorObject& self, OpKind kind, const CallArguments& arguments) {
  Communicator& core = **self.core;
  auto call = std::make_unique<Call>();
  if (!call->prepare(kind, arguments, core.rank(), core.size()) ||
      !choose_program(self, arguments.algorithm, *call))
    return nullptr;
  return start_prepared(self, std::move(call), arguments.result(kind));
}

// The argument `x`, borrowed; null where there is none. `at`: its place among the parameters.
PyObject* find_x(PyObject* const* args, Py_ssize_t positional, PyObject* names, Py_ssize_t at) {
  if (positional > at) return args[at];
  const Py_ssize_t named = names != nullptr ? PyTuple_GET_SIZE(names) : 0;
  for (Py_ssize_t i = 0; i < named; ++i)
    if (PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(names, i), "x") == 0)
      return args[positional + i];
  return nullptr;
}

// Whether an argument is a pycollective.Accumulator. An array is hardly asked.
bool is_accumulator(PyObject* given) {
  return given != nullptr && !PyObject_CheckBuffer(given) &&
         PyObject_HasAttrString(reinterpret_cast<PyObject*>(Py_TYPE(given)), "_spend") != 0;
}

// The same for a list of them, which is refused.
bool lists_accumulators(PyObject* given) {
  return given != nullptr && (PyList_Check(given) || PyTuple_Check(given)) &&
         PySequence_Fast_GET_SIZE(given) > 0 && is_accumulator(PySequence_Fast_GET_ITEM(given, 0));
}

// To pycollective.leaves.reduction, which has a method of the same name.
PyObject* hand_over(PyObject* self, OpKind kind, PyObject* const* args, Py_ssize_t positional,
                    PyObject* names) {
  PyObject* leaves = PyObject_GetAttrString(self, "_leaf_reductions");
  PyObject* method = leaves != nullptr ? PyObject_GetAttrString(leaves, name_of(kind)) : nullptr;
  PyObject* result =
      method != nullptr
          ? PyObject_Vectorcall(method, args, static_cast<std::size_t>(positional), names)
          : nullptr;
  Py_XDECREF(method);
  Py_XDECREF(leaves);
  return result;
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
  if constexpr (reduces(method.kind)) {
    PyObject* x = find_x(args, positional, names, method.parameters[0].role == Role::kOutput);
    if (core != nullptr && (is_accumulator(x) || lists_accumulators(x)))
      return hand_over(self, method.kind, args, positional, names);
  }
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
