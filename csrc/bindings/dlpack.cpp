#include "bindings/dlpack.h"

#include <utility>

#include "bindings/errors_py.h"

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
  return names.method != nullptr && names.keywords != nullptr && names.with_stream != nullptr &&
         names.stream_alone != nullptr && names.version != nullptr;
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
