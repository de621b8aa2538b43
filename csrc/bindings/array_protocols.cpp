#include "bindings/array_protocols.h"

#include <cstring>
#include <stdexcept>
#include <utility>

#include "bindings/errors_py.h"
#include "cuda/gpu.h"
#include "engine/api.h"

namespace pycollective::dlpack {
namespace {

constexpr std::uint32_t kMajor = 1;

// They live as long as the module that the interpreter keeps.
struct Names {
  PyObject* method;        // "__dlpack__"
  PyObject* keywords;      // ("max_version",)
  PyObject* with_stream;   // ("max_version", "stream")
  PyObject* stream_alone;  // ("stream",)
  PyObject* version;       // (1, 0)
  PyObject* is_neg;        // torch's
};
Names names;

// Whether there is the method at all, asked while an AttributeError is set, which is kept if so.
bool has_method(PyObject* object) {
  PyObject* type = nullptr;
  PyObject* value = nullptr;
  PyObject* traceback = nullptr;
  PyErr_Fetch(&type, &value, &traceback);
  const bool found = PyObject_HasAttr(object, names.method) != 0;
  if (found) {
    PyErr_Restore(type, value, traceback);
  } else {
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(traceback);
  }
  return found;
}

bool takes_items(PyTypeObject* type) {
  const PyMappingMethods* mapping = type->tp_as_mapping;
  const PySequenceMethods* sequence = type->tp_as_sequence;
  return (mapping != nullptr && mapping->mp_ass_subscript != nullptr) ||
         (sequence != nullptr && sequence->sq_ass_item != nullptr);
}

bool gives_items(PyTypeObject* type) {
  const PyMappingMethods* mapping = type->tp_as_mapping;
  const PySequenceMethods* sequence = type->tp_as_sequence;
  return (mapping != nullptr && mapping->mp_subscript != nullptr) ||
         (sequence != nullptr && sequence->sq_item != nullptr);
}

}  // namespace

bool init_import() {
  names.method = PyUnicode_InternFromString("__dlpack__");
  names.keywords = Py_BuildValue("(N)", PyUnicode_InternFromString("max_version"));
  names.with_stream = Py_BuildValue("(NN)", PyUnicode_InternFromString("max_version"),
                                    PyUnicode_InternFromString("stream"));
  names.stream_alone = Py_BuildValue("(N)", PyUnicode_InternFromString("stream"));
  names.version = Py_BuildValue("(ii)", static_cast<int>(kMajor), 0);
  names.is_neg = PyUnicode_InternFromString("is_neg");
  return names.method != nullptr && names.keywords != nullptr && names.with_stream != nullptr &&
         names.stream_alone != nullptr && names.version != nullptr && names.is_neg != nullptr;
}

// torch's __dlpack__ looks at the lazy conjugate, and not at the lazy sign.
bool check_sign(PyObject* object, const char* name) {
  PyObject* const is_neg = _PyType_Lookup(Py_TYPE(object), names.is_neg);
  if (is_neg == nullptr || !PyCallable_Check(is_neg)) return true;  // not torch's
  PyObject* const lazy = PyObject_CallOneArg(is_neg, object);
  if (lazy == nullptr) return false;
  Py_DECREF(lazy);
  if (lazy != Py_True) return true;
  raise_configuration_error(
      "%s (a %.200s) is negated lazily, and its memory has the other sign: give x.resolve_neg()",
      name, Py_TYPE(object)->tp_name);
  return false;
}

PyObject* ask_for_capsule(PyObject* object, const char* name, std::optional<long long> stream) {
  PyObject* number = nullptr;
  if (stream && (number = PyLong_FromLongLong(*stream)) == nullptr) return nullptr;
  PyObject* const arguments[] = {object, names.version, number};
  PyObject* capsule = PyObject_VectorcallMethod(names.method, arguments, 1,
                                                stream ? names.with_stream : names.keywords);
  if (capsule == nullptr && PyErr_ExceptionMatches(PyExc_TypeError)) {
    // A producer from before versions does not know the keyword. If that was not the reason, it
    // says its own once more.
    PyErr_Clear();
    PyObject* const unversioned[] = {object, number};
    capsule = PyObject_VectorcallMethod(names.method, unversioned, 1,
                                        stream ? names.stream_alone : nullptr);
  }
  Py_XDECREF(number);
  if (capsule != nullptr || !PyErr_ExceptionMatches(PyExc_AttributeError)) return capsule;
  if (!has_method(object))
    raise_configuration_error("%s is a %.200s; NumPy arrays and arrays with DLPack are supported",
                              name, Py_TYPE(object)->tp_name);
  return nullptr;
}

const Tensor* open_capsule(PyObject* capsule, const char* name, Writing& writing) {
  if (!PyCapsule_IsValid(capsule, "dltensor_versioned")) {
    writing = Writing::kNotSaid;
    return static_cast<const Tensor*>(PyCapsule_GetPointer(capsule, "dltensor"));
  }
  const auto* versioned =
      static_cast<const VersionedTensor*>(PyCapsule_GetPointer(capsule, "dltensor_versioned"));
  if (versioned->version.major != kMajor) {
    raise_configuration_error("%s came as DLPack version %u.%u, and version %u.x was asked for",
                              name, versioned->version.major, versioned->version.minor, kMajor);
    return nullptr;
  }
  writing = Writing::kAllowed;
  if ((versioned->flags & kIsCopied) != 0) writing = Writing::kIntoCopy;
  if ((versioned->flags & kReadOnly) != 0) writing = Writing::kReadOnly;
  return &versioned->tensor;
}

int looks_immutable(PyObject* object) {
  // As a tuple does: it gives items and takes none.
  PyTypeObject* type = Py_TYPE(object);
  if (gives_items(type) && !takes_items(type)) return 1;
  // JAX (0.10) exports without a version, whatever is asked; its buffers are read-only.
  if (!PyObject_CheckBuffer(object)) return 0;
  Py_buffer buffer;
  if (PyObject_GetBuffer(object, &buffer, PyBUF_STRIDED) == 0) {
    PyBuffer_Release(&buffer);
    return 0;
  }
  if (!PyErr_ExceptionMatches(PyExc_BufferError)) return -1;
  PyErr_Clear();
  return 1;
}

namespace {

// As it was before versions.
struct UnversionedTensor {
  Tensor tensor;
  void* manager;
  void (*deleter)(UnversionedTensor*);
};

// What a capsule points to, and all that it needs.
template <class Managed>
struct Holder {
  Managed managed;
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;
  std::shared_ptr<const void> owner;
};

template <class Managed>
constexpr const char* kName = "dltensor";
template <>
constexpr const char* kName<VersionedTensor> = "dltensor_versioned";

template <class Managed>
void destroy(PyObject* capsule) {
  // A consumer that has taken the tensor over has given the capsule another name.
  if (!PyCapsule_IsValid(capsule, kName<Managed>)) return;
  auto* managed = static_cast<Managed*>(PyCapsule_GetPointer(capsule, kName<Managed>));
  managed->deleter(managed);
}

template <class Managed>
PyObject* make(const Exported& exported, std::shared_ptr<const void> owner) {
  auto holder = std::make_unique<Holder<Managed>>();
  holder->shape = exported.shape;
  holder->strides.resize(exported.shape.size());
  std::int64_t stride = 1;
  for (std::size_t i = exported.shape.size(); i-- > 0; stride *= exported.shape[i])
    holder->strides[i] = stride;
  holder->owner = std::move(owner);
  Managed& managed = holder->managed;
  managed = {};
  if constexpr (std::is_same_v<Managed, VersionedTensor>) managed.version = {1, 0};
  managed.tensor = {exported.data,
                    exported.device,
                    static_cast<std::int32_t>(exported.shape.size()),
                    exported.dtype,
                    holder->shape.data(),
                    holder->strides.data(),
                    0};
  managed.manager = holder.get();
  managed.deleter = [](Managed* self) { delete static_cast<Holder<Managed>*>(self->manager); };
  PyObject* capsule = PyCapsule_New(&managed, kName<Managed>, &destroy<Managed>);
  if (capsule != nullptr) holder.release();
  return capsule;
}

}  // namespace

PyObject* make_capsule(const Exported& tensor, std::shared_ptr<const void> owner, bool versioned) {
  return versioned ? make<VersionedTensor>(tensor, std::move(owner))
                   : make<UnversionedTensor>(tensor, std::move(owner));
}

}  // namespace pycollective::dlpack

namespace pycollective {
namespace {

// They live as long as the module that the interpreter keeps.
struct Names {
  PyObject* interface;      // "__cuda_array_interface__"
  PyObject* dlpack_device;  // "__dlpack_device__"
  PyObject* is_cuda;        // "is_cuda", torch's
};
Names names;

// DLPack's and the interface's number of the legacy stream; the driver's handle of it is null.
constexpr long long kLegacy = 1;

// A new reference of our own, so that callers need not look after it.
class Owned {
 public:
  explicit Owned(PyObject* object) : object_(object) {}
  ~Owned() { Py_XDECREF(object_); }
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  PyObject* get() const { return object_; }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_;
};

bool set_handle(PyObject* number, NamedStream& stream) {
  const unsigned long long value = PyLong_AsUnsignedLongLong(number);
  if (value == ~0ULL && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    raise_configuration_error("stream %R is no stream's handle", number);
    return false;
  }
  stream.given = true;
  stream.handle = value == kLegacy ? nullptr : reinterpret_cast<void*>(value);
  return true;
}

// The attribute, or null where there is none or it cannot be had.
PyObject* attribute(PyObject* object, const char* name) {
  PyObject* found = PyObject_GetAttrString(object, name);
  if (found == nullptr) PyErr_Clear();
  return found;
}

bool refuse_interface(const char* name, const char* what) {
  raise_configuration_error("%s has a __cuda_array_interface__ whose '%s' is not as it should be",
                            name, what);
  return false;
}

bool read_data(PyObject* interface, const char* name, CudaArray& array) {
  PyObject* const data = PyDict_GetItemString(interface, "data");
  if (data == nullptr || !PyTuple_Check(data) || PyTuple_GET_SIZE(data) != 2)
    return refuse_interface(name, "data");
  array.data = PyLong_AsVoidPtr(PyTuple_GET_ITEM(data, 0));
  const int read_only = PyObject_IsTrue(PyTuple_GET_ITEM(data, 1));
  if (PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    return refuse_interface(name, "data");
  }
  array.read_only = read_only == 1;
  return true;
}

// "<f4": little-endian, a kind, a size.
bool read_type(PyObject* interface, const char* name, CudaArray& array) {
  PyObject* const type = PyDict_GetItemString(interface, "typestr");
  const char* const text =
      type != nullptr && PyUnicode_Check(type) ? PyUnicode_AsUTF8(type) : nullptr;
  if (text == nullptr || std::strlen(text) != 3 || std::strchr("<|", text[0]) == nullptr ||
      text[2] < '1' || text[2] > '9') {
    PyErr_Clear();
    return refuse_interface(name, "typestr");
  }
  array.kind = text[1];
  array.element = static_cast<std::size_t>(text[2] - '0');
  return true;
}

bool read_numbers(PyObject* tuple, int& length, std::int64_t* numbers) {
  if (tuple == nullptr || !PyTuple_Check(tuple) ||
      PyTuple_GET_SIZE(tuple) > CudaArray::kMaxDimensions)
    return false;
  length = static_cast<int>(PyTuple_GET_SIZE(tuple));
  for (int i = 0; i < length; ++i) numbers[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, i));
  const bool failed = PyErr_Occurred() != nullptr;
  PyErr_Clear();
  return !failed;
}

bool find_device(const char* name, CudaArray& array) {
  if (array.data == nullptr) {
    array.device = Location::kAnyDevice;
    return true;
  }
  try {
    array.device = cuda::device_of(array.data);
    return true;
  } catch (const std::exception& error) {
    raise_configuration_error("%s: %s", name, error.what());
    return false;
  }
}

}  // namespace

bool init_cuda_array() {
  names.interface = PyUnicode_InternFromString("__cuda_array_interface__");
  names.dlpack_device = PyUnicode_InternFromString("__dlpack_device__");
  names.is_cuda = PyUnicode_InternFromString("is_cuda");
  return names.interface != nullptr && names.dlpack_device != nullptr && names.is_cuda != nullptr;
}

bool read_stream(PyObject* object, NamedStream& stream) {
  if (object == nullptr || object == Py_None) return true;
  if (PyLong_Check(object)) return set_handle(object, stream);
  if (const Owned method{attribute(object, "__cuda_stream__")}) {
    const Owned answer(PyObject_CallNoArgs(method.get()));
    if (!answer) return false;
    if (PyTuple_Check(answer.get()) && PyTuple_GET_SIZE(answer.get()) == 2)
      return set_handle(PyTuple_GET_ITEM(answer.get(), 1), stream);
  }
  for (const char* name : {"cuda_stream", "ptr"})
    if (const Owned handle{attribute(object, name)}; handle && PyLong_Check(handle.get()))
      return set_handle(handle.get(), stream);
  raise_configuration_error(
      "stream is a %.200s; give None, a handle as a number, or a stream of torch, CuPy or "
      "cuda.core",
      Py_TYPE(object)->tp_name);
  return false;
}

bool knows_cuda(PyObject* object) {
  PyTypeObject* const type = Py_TYPE(object);
  if (_PyType_Lookup(type, names.interface) == nullptr) return false;
  if (_PyType_Lookup(type, names.is_cuda) == nullptr) return true;
  const Owned is_cuda(PyObject_GetAttr(object, names.is_cuda));
  if (!is_cuda) PyErr_Clear();
  return is_cuda.get() != Py_False;
}

int ask_for_device(PyObject* object, dlpack::Device& device) {
  const Owned answer(PyObject_CallMethodNoArgs(object, names.dlpack_device));
  if (!answer) {
    if (!PyErr_ExceptionMatches(PyExc_AttributeError)) return -1;
    PyErr_Clear();
    return 0;
  }
  int type = 0;
  int number = 0;
  if (!PyTuple_Check(answer.get()) || !PyArg_ParseTuple(answer.get(), "ii", &type, &number))
    return -1;
  device = {type, number};
  return 1;
}

bool ask_for_stream(PyObject* object, NamedStream& stream) {
  const Owned interface(PyObject_GetAttr(object, names.interface));
  if (!interface) {  // torch refuses some dtypes, and whatever needs a gradient
    PyErr_Clear();
    return true;
  }
  PyObject* const said =
      PyDict_Check(interface.get()) ? PyDict_GetItemString(interface.get(), "stream") : nullptr;
  return said == nullptr || said == Py_None || set_handle(said, stream);
}

bool read_cuda_interface(PyObject* object, const char* name, CudaArray& array) {
  const Owned interface(PyObject_GetAttr(object, names.interface));
  if (!interface) return false;
  if (!PyDict_Check(interface.get())) return refuse_interface(name, "type");
  if (!read_data(interface.get(), name, array) || !read_type(interface.get(), name, array))
    return false;
  PyObject* const mask = PyDict_GetItemString(interface.get(), "mask");
  if (mask != nullptr && mask != Py_None) return refuse_interface(name, "mask");
  if (!read_numbers(PyDict_GetItemString(interface.get(), "shape"), array.dimensions, array.shape))
    return refuse_interface(name, "shape");
  PyObject* const strides = PyDict_GetItemString(interface.get(), "strides");
  array.has_strides = strides != nullptr && strides != Py_None;
  int length = array.dimensions;
  if (array.has_strides &&
      (!read_numbers(strides, length, array.strides) || length != array.dimensions))
    return refuse_interface(name, "strides");
  return find_device(name, array);
}

long long dlpack_stream(const NamedStream& stream) {
  return stream.handle == nullptr ? kLegacy : reinterpret_cast<long long>(stream.handle);
}

}  // namespace pycollective
