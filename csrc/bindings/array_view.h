// A view of the caller's array, without a copy: of NumPy (with ml_dtypes' types), or of anything
// with DLPack (torch, CuPy, ...) or the CUDA array interface.
#pragma once

#include <Python.h>

#include <cstddef>
#include <vector>

#include "bindings/array_protocols.h"
#include "types.h"

namespace pycollective {

class ArrayView {
 public:
  static constexpr int kMaxDimensions = 32;

  ArrayView() = default;
  ~ArrayView();
  ArrayView(const ArrayView&) = delete;
  ArrayView& operator=(const ArrayView&) = delete;

  // Opens an array in the host's memory. False with a Python error set (ConfigurationError, or what
  // its __dlpack__ raised) if `object` is none that can be moved. `name` is for messages.
  bool open(PyObject* object, const char* name);
  // The same, or an array on a GPU, which must be contiguous. `stream` is where the caller works on
  // it.
  bool open_anywhere(PyObject* object, const char* name, const NamedStream& stream);

  // Replaces an array that is not contiguous by a C-contiguous copy, so that data() serves as input
  // or output. copy_back() then copies an output back. False with a Python error set.
  bool stage();
  bool copy_back();

  // Whether `object`, which was opened, may be an output. False with a ConfigurationError set.
  // `kind` is for messages.
  bool check_writable(PyObject* object, const char* kind) const;

  void* data() const { return data_; }
  // The GPU, or -1 for the host's memory; and the stream there: the one that was named, else the
  // array's own, else the legacy default stream.
  int device() const { return device_; }
  const NamedStream& stream() const { return stream_; }
  Dtype dtype() const { return dtype_; }
  std::size_t count() const { return count_; }
  bool contiguous() const { return contiguous_; }
  int dimensions() const { return dimensions_; }
  std::size_t extent(int dimension) const { return static_cast<std::size_t>(shape_[dimension]); }
  // Adds the owners of the memory of data() and of the caller's array; borrowed.
  void add_owners(std::vector<PyObject*>& owners) const {
    for (PyObject* each : {owner_, staged_})
      if (each != nullptr) owners.push_back(each);
  }
  bool same_shape(const ArrayView& other) const;
  bool has_shape(PyObject* sizes) const;  // a tuple of numbers

 private:
  bool open_numpy(PyObject* object, const char* name);
  bool open_dlpack(PyObject* object, const char* name, bool on_device);
  bool open_interface(PyObject* object, const char* name);
  void set_shape(int dimensions, const std::int64_t* shape, const std::int64_t* strides,
                 Py_ssize_t unit);
  bool repeats() const;  // a broadcast view: elements share memory
  bool check_memory(PyObject* object, const char* name) const;
  bool check_device(const char* name) const;
  PyObject* as_words() const;  // a NumPy view of the bits, strides kept

  void* data_ = nullptr;
  int device_ = -1;
  NamedStream stream_;
  std::size_t count_ = 0;
  Dtype dtype_ = Dtype::kUInt8;
  bool contiguous_ = true;
  dlpack::Writing writing_ = dlpack::Writing::kAllowed;
  int dimensions_ = 0;
  Py_ssize_t shape_[kMaxDimensions];
  Py_ssize_t strides_[kMaxDimensions];  // bytes
  void* strided_data_ = nullptr;        // of the caller's array, while staged
  PyObject* owner_ = nullptr;           // the array, or the DLPack capsule
  PyObject* staged_ = nullptr;
};

// Once, when the module is made. False with a Python error set.
bool init_array_view();

}  // namespace pycollective
