#define NPY_NO_DEPRECATED_API NPY_1_23_API_VERSION
#define NPY_TARGET_VERSION NPY_1_23_API_VERSION
#include "bindings/array_view.h"

#include <numpy/arrayobject.h>

#include <array>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "bindings/array_protocols.h"
#include "bindings/errors_py.h"

namespace pycollective {
namespace {

// By NumPy's number of a type of its own; made once, from the table.
constexpr int kNumpyTypes = NPY_HALF + 1;  // the last of its own
std::array<std::optional<Dtype>, kNumpyTypes> numpy_types;

PyObject* filled;  // "filled", which masked arrays have; it lives as long as the module

std::optional<Dtype> dtype_of(PyArray_Descr* descr) {
  if (descr->type_num >= 0 && descr->type_num < kNumpyTypes)
    return numpy_types[static_cast<std::size_t>(descr->type_num)];
  if (descr->type_num < NPY_USERDEF) return std::nullopt;
  // ml_dtypes registers its types at run time; they are known by name alone.
  std::string_view name = descr->typeobj->tp_name;
  constexpr std::string_view kModule = "ml_dtypes.";
  if (name.substr(0, kModule.size()) == kModule) name.remove_prefix(kModule.size());
  const DtypeTraits* found = find_named(kDtypeTable, name);
  if (found == nullptr || found->numpy_kind != 0) return std::nullopt;
  return found->dtype;
}

std::optional<Dtype> dtype_of(const dlpack::DataType& type) {
  if (type.lanes != 1) return std::nullopt;
  for (const DtypeTraits& row : kDtypeTable)
    if (type.code == static_cast<std::uint8_t>(row.dlpack) && type.bits == 8 * row.size)
      return row.dtype;
  return std::nullopt;
}

std::string supported() { return list_names(kDtypeTable); }

}  // namespace

bool init_array_view() {
  import_array1(false);
  for (int number = 0; number < kNumpyTypes; ++number) {
    PyArray_Descr* descr = PyArray_DescrFromType(number);
    if (descr == nullptr) return false;
    for (const DtypeTraits& row : kDtypeTable)
      if (descr->kind == row.numpy_kind &&
          static_cast<std::size_t>(PyDataType_ELSIZE(descr)) == row.size)
        numpy_types[static_cast<std::size_t>(number)] = row.dtype;
    Py_DECREF(descr);
  }
  filled = PyUnicode_InternFromString("filled");
  return filled != nullptr && dlpack::init_import() && init_cuda_array();
}

ArrayView::~ArrayView() {
  if (owner_ == nullptr) return;
  // A producer's deleter may run Python, which must not find the error that is being raised.
  PyObject* type = nullptr;
  PyObject* value = nullptr;
  PyObject* traceback = nullptr;
  const bool failing = PyErr_Occurred() != nullptr;
  if (failing) PyErr_Fetch(&type, &value, &traceback);
  Py_DECREF(owner_);
  Py_XDECREF(staged_);
  if (failing) PyErr_Restore(type, value, traceback);
}

bool ArrayView::open(PyObject* object, const char* name) {
  if (PyArray_Check(object)) return open_numpy(object, name);
  if (!open_dlpack(object, name, false)) return false;
  if (device_ < 0) return true;
  raise_configuration_error("%s lies on a GPU; this takes arrays in the host's memory", name);
  return false;
}

bool ArrayView::open_anywhere(PyObject* object, const char* name, const NamedStream& stream) {
  if (PyArray_Check(object)) return open_numpy(object, name);
  // Whoever hands over an array of a GPU is told the stream, and makes it wait; so it is asked
  // where the array is before.
  stream_ = stream;
  bool on_device = false;
  if (stream.given || knows_cuda(object)) {
    dlpack::Device device{};
    const int said = ask_for_device(object, device);
    if (said < 0) return false;
    if (said == 0 && knows_cuda(object)) return open_interface(object, name);
    on_device = device.type == dlpack::kCuda || device.type == dlpack::kCudaManaged;
    if (on_device && !stream.given && !ask_for_stream(object, stream_)) return false;
  }
  return open_dlpack(object, name, on_device) && check_device(name);
}

// Wrappers of tensors (DTensor, FakeTensor), torch's lazy zeros and what was freed have none.
bool ArrayView::check_memory(PyObject* object, const char* name) const {
  if (data_ != nullptr || count_ == 0) return true;
  raise_configuration_error(
      "%s is of type %.200s and has no memory of its own: give the tensor that it wraps (of a "
      "DTensor x.to_local()), or a copy",
      name, Py_TYPE(object)->tp_name);
  return false;
}

bool ArrayView::check_device(const char* name) const {
  if (device_ < 0 || contiguous_) return true;
  raise_configuration_error("%s lies on GPU %d and is not contiguous; give a contiguous copy of it",
                            name, device_);
  return false;
}

bool ArrayView::open_numpy(PyObject* object, const char* name) {
  auto* array = reinterpret_cast<PyArrayObject*>(object);
  if (!PyArray_CheckExact(object) && _PyType_Lookup(Py_TYPE(object), filled) != nullptr) {
    raise_configuration_error("%s is a %.200s, whose mask is not kept: give x.filled(0) or x.data",
                              name, Py_TYPE(object)->tp_name);
    return false;
  }
  PyArray_Descr* descr = PyArray_DESCR(array);
  const std::optional<Dtype> dtype = dtype_of(descr);
  if (!dtype || !PyArray_ISNOTSWAPPED(array)) {
    raise_configuration_error("%s has dtype %R; supported are %s in native byte order", name,
                              reinterpret_cast<PyObject*>(descr), supported().c_str());
    return false;
  }
  dtype_ = *dtype;
  data_ = PyArray_DATA(array);
  count_ = static_cast<std::size_t>(PyArray_SIZE(array));
  contiguous_ = PyArray_IS_C_CONTIGUOUS(array) || count_ == 0;
  writing_ = PyArray_ISWRITEABLE(array) ? dlpack::Writing::kAllowed : dlpack::Writing::kReadOnly;
  dimensions_ = PyArray_NDIM(array);
  if (dimensions_ > kMaxDimensions) {
    raise_configuration_error("%s has more than %d dimensions", name, kMaxDimensions);
    return false;
  }
  for (int i = 0; i < dimensions_; ++i) {
    shape_[i] = PyArray_DIM(array, i);
    strides_[i] = PyArray_STRIDE(array, i);
  }
  owner_ = Py_NewRef(object);
  return true;
}

bool ArrayView::open_dlpack(PyObject* object, const char* name, bool on_device) {
  if (!dlpack::check_sign(object, name)) return false;
  // Unconsumed, the capsule calls the producer's deleter when it goes: it is the keepalive.
  owner_ = dlpack::ask_for_capsule(
      object, name, on_device ? std::optional(dlpack_stream(stream_)) : std::nullopt);
  if (owner_ == nullptr) return false;
  const dlpack::Tensor* tensor = dlpack::open_capsule(owner_, name, writing_);
  if (tensor == nullptr) return false;
  switch (tensor->device.type) {
    case dlpack::kCpu:
    case dlpack::kCudaHost:
      break;
    case dlpack::kCuda:
    case dlpack::kCudaManaged:
      device_ = tensor->device.id;
      break;
    default:
      raise_configuration_error(
          "%s lies on a device of DLPack's type %d; arrays in the host's memory and on CUDA's GPUs "
          "are moved",
          name, static_cast<int>(tensor->device.type));
      return false;
  }
  const std::optional<Dtype> dtype = dtype_of(tensor->dtype);
  if (!dtype || tensor->ndim > kMaxDimensions) {
    raise_configuration_error(
        "%s has DLPack type code %d, %d bits, %d dimensions; supported are %s, in at most %d "
        "dimensions",
        name, tensor->dtype.code, tensor->dtype.bits, tensor->ndim, supported().c_str(),
        kMaxDimensions);
    return false;
  }
  dtype_ = *dtype;
  if (tensor->data != nullptr) data_ = static_cast<std::byte*>(tensor->data) + tensor->byte_offset;
  set_shape(tensor->ndim, tensor->shape, tensor->strides, static_cast<Py_ssize_t>(size_of(dtype_)));
  return check_memory(object, name);
}

bool ArrayView::open_interface(PyObject* object, const char* name) {
  CudaArray array;
  if (!read_cuda_interface(object, name, array)) return false;
  if (!stream_.given && !ask_for_stream(object, stream_)) return false;
  const DtypeTraits* found = nullptr;
  for (const DtypeTraits& row : kDtypeTable)
    if (row.numpy_kind == array.kind && row.size == array.element) found = &row;
  if (found == nullptr) {
    raise_configuration_error("%s has elements of kind '%c' and %zu bytes; supported are %s", name,
                              array.kind, array.element, supported().c_str());
    return false;
  }
  dtype_ = found->dtype;
  data_ = array.data;
  device_ = array.device;
  writing_ = array.read_only ? dlpack::Writing::kReadOnly : dlpack::Writing::kAllowed;
  set_shape(array.dimensions, array.shape, array.has_strides ? array.strides : nullptr, 1);
  owner_ = Py_NewRef(object);
  return check_memory(object, name) && check_device(name);
}

// `strides` in units of so many bytes, or null.
void ArrayView::set_shape(int dimensions, const std::int64_t* shape, const std::int64_t* strides,
                          Py_ssize_t unit) {
  dimensions_ = dimensions;
  Py_ssize_t expected = static_cast<Py_ssize_t>(size_of(dtype_));
  count_ = 1;
  for (int i = dimensions_ - 1; i >= 0; --i) {
    shape_[i] = shape[i];
    strides_[i] = strides != nullptr ? strides[i] * unit : expected;
    if (shape_[i] != 1 && strides_[i] != expected) contiguous_ = false;
    expected *= shape_[i];
    count_ *= static_cast<std::size_t>(shape_[i]);
  }
  if (count_ == 0) contiguous_ = true;
}

bool ArrayView::repeats() const {
  for (int i = 0; !contiguous_ && i < dimensions_; ++i)
    if (shape_[i] > 1 && strides_[i] == 0) return true;
  return false;
}

bool ArrayView::check_writable(PyObject* object, const char* kind) const {
  const bool repeated = repeats();
  if (writing_ == dlpack::Writing::kAllowed && !repeated) return true;
  if (writing_ == dlpack::Writing::kNotSaid && !repeated) {
    const int immutable = dlpack::looks_immutable(object);
    if (immutable <= 0) return immutable == 0;
  }
  raise_configuration_error(
      "%s: the output array (a %.200s) %s; give one that may be written, such as a copy: "
      "numpy.array(x)",
      kind, Py_TYPE(object)->tp_name,
      repeated ? "is a broadcast view, whose elements share memory"
      : writing_ == dlpack::Writing::kIntoCopy
          ? "hands over a copy of itself, in which the result would be lost"
          : "is read-only");
  return false;
}

PyObject* ArrayView::as_words() const {
  constexpr int words[9] = {0, NPY_UINT8, NPY_UINT16, 0, NPY_UINT32, 0, 0, 0, NPY_UINT64};
  npy_intp shape[kMaxDimensions];
  npy_intp strides[kMaxDimensions];
  for (int i = 0; i < dimensions_; ++i) {
    shape[i] = shape_[i];
    strides[i] = strides_[i];
  }
  return PyArray_New(&PyArray_Type, dimensions_, shape, words[size_of(dtype_)], strides,
                     strided_data_ ? strided_data_ : data_, 0, NPY_ARRAY_WRITEABLE, nullptr);
}

bool ArrayView::stage() {
  if (contiguous_ || staged_ != nullptr) return true;
  PyObject* words = as_words();
  if (words == nullptr) return false;
  staged_ = PyArray_NewCopy(reinterpret_cast<PyArrayObject*>(words), NPY_CORDER);
  Py_DECREF(words);
  if (staged_ == nullptr) return false;
  strided_data_ = data_;
  data_ = PyArray_DATA(reinterpret_cast<PyArrayObject*>(staged_));
  return true;
}

bool ArrayView::copy_back() {
  if (staged_ == nullptr) return true;
  PyObject* words = as_words();
  if (words == nullptr) return false;
  const int failed = PyArray_CopyInto(reinterpret_cast<PyArrayObject*>(words),
                                      reinterpret_cast<PyArrayObject*>(staged_));
  Py_DECREF(words);
  return failed == 0;
}

bool ArrayView::same_shape(const ArrayView& other) const {
  return dimensions_ == other.dimensions_ &&
         std::memcmp(shape_, other.shape_, sizeof(Py_ssize_t) * dimensions_) == 0;
}

bool ArrayView::has_shape(PyObject* sizes) const {
  if (PyTuple_GET_SIZE(sizes) != dimensions_) return false;
  for (int i = 0; i < dimensions_; ++i)
    if (PyLong_AsSsize_t(PyTuple_GET_ITEM(sizes, i)) != shape_[i]) return false;
  return true;
}

}  // namespace pycollective
