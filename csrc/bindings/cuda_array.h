// Arrays on a GPU: the stream that a call follows, and the CUDA array interface, which some arrays
// have beside DLPack or in its place.
#pragma once

#include <Python.h>

#include "bindings/dlpack.h"

namespace pycollective {

// The driver's handle of a stream, where one was named.
struct NamedStream {
  bool given = false;
  void* handle = nullptr;  // null: the legacy default stream
};

// Reads a caller's `stream`: None, a number, or an object with `__cuda_stream__`, `cuda_stream`
// (torch) or `ptr` (CuPy). False with a ConfigurationError set.
bool read_stream(PyObject* object, NamedStream& stream);

// Whether the array may have the CUDA array interface. Cheap; no for a torch tensor on the CPU.
bool knows_cuda(PyObject* object);
// Where the array lies by `__dlpack_device__`, if it says so: 1 or 0, or -1 with an error set.
int ask_for_device(PyObject* object, dlpack::Device& device);
// Asks the array for its stream, and leaves `stream` as it is if it names none. False with a Python
// error set.
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
