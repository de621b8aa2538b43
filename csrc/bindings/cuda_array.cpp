#include "bindings/cuda_array.h"

#include <cstring>
#include <stdexcept>

#include "bindings/errors_py.h"
#include "cuda/gpu.h"
#include "engine/api.h"

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
