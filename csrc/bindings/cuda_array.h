// What concerns arrays on a GPU: the stream that a call is to follow, and the CUDA array interface,
// beside DLPack or in its place.
#pragma once

#include <Python.h>

#include "bindings/dlpack.h"

namespace pycollective {

// The driver's handle of a stream, where one was named.
struct NamedStream {
  bool given = false;
  void* handle = nullptr;  // null: the legacy default stream
};

// What a caller gave as `stream`: None, a number, or what has `__cuda_stream__`, `cuda_stream`
// (torch) or `ptr` (CuPy). False with a ConfigurationError set.
bool read_stream(PyObject* object, NamedStream& stream);

// Whether the array may say more of itself by the CUDA array interface. Cheap: a torch tensor on
// the CPU says no.
bool knows_cuda(PyObject* object);
// Where the array lies by `__dlpack_device__`, if it says so: 1 or 0, or -1 with an error set.
int ask_for_device(PyObject* object, dlpack::Device& device);
// What the array says of its stream. False with a Python error set; `stream` is left as it is where
// it says nothing.
bool ask_for_stream(PyObject* object, NamedStream& stream);

// A GPU's array as the interface describes it; strides in bytes, empty: C-contiguous.
struct CudaArray {
  static constexpr int kMaxDimensions = 32;
  void* data = nullptr;
  int device = 0;
  bool read_only = false;
  char kind = 0;  // as NumPy's
  std::size_t element = 0;
  int dimensions = 0;
  bool has_strides = false;
  std::int64_t shape[kMaxDimensions];
  std::int64_t strides[kMaxDimensions];
};

// False with a Python error set: ConfigurationError where the interface is not as it should be.
bool read_cuda_interface(PyObject* object, const char* name, CudaArray& array);

// The number for `__dlpack__(stream=...)`.
long long dlpack_stream(const NamedStream& stream);

// Once, when the module is made. False with a Python error set.
bool init_cuda_array();

}  // namespace pycollective
