// How libraries hand over arrays: DLPack, for arrays of others and our own memory for others; and
// the CUDA array interface, which some arrays have beside DLPack or in its place.
#pragma once

#include <Python.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace pycollective::dlpack {

// --- The ABI, as far as it is used: version 1.x, and 0.x, whose capsules hold a tensor without a
// version. The field order and values are the standard's.

enum DeviceType : std::int32_t { kCpu = 1, kCuda = 2, kCudaHost = 3, kCudaManaged = 13 };

struct Device {
  std::int32_t type;
  std::int32_t id;
};

struct DataType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  std::int32_t ndim;
  DataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;  // elements; null: C-contiguous
  std::uint64_t byte_offset;
};

struct Version {
  std::uint32_t major;  // another one: nothing behind `deleter` may be looked at
  std::uint32_t minor;
};

enum Flag : std::uint64_t { kReadOnly = 1, kIsCopied = 2 };

struct VersionedTensor {
  Version version;
  void* manager;
  void (*deleter)(VersionedTensor*);
  std::uint64_t flags;
  Tensor tensor;
};

// --- Arrays of others: how they are asked for, and what their producer says of writing.

enum class Writing {
  kAllowed,
  kReadOnly,
  kIntoCopy,  // what was handed over is a copy: a result would be lost in it
  kNotSaid,   // by a producer without versions
};

// Asks `object` for its capsule, of version 1.x if the producer knows it, else without a version. A
// new reference; null with a Python error set: ConfigurationError if there is no DLPack, or what
// the producer raised. `name` is for messages. `stream`: DLPack's number of the stream that will
// use an array on a GPU.
PyObject* ask_for_capsule(PyObject* object, const char* name, std::optional<long long> stream);

// False where the array's memory holds other numbers than the array shows: with the sign that torch
// has yet to change (`x.conj().imag`). A ConfigurationError is set, or what the array raised.
bool check_sign(PyObject* object, const char* name);

// What the capsule holds, borrowed from it. Null with a Python error set.
const Tensor* open_capsule(PyObject* capsule, const char* name, Writing& writing);

// For kNotSaid: 1 if `object` shows otherwise that it is immutable, 0 if not, -1 with a Python
// error set.
int looks_immutable(PyObject* object);

// Once, when the module is made. False with a Python error set.
bool init_import();

// --- A capsule over memory of a GPU, for a consumer that takes it over or lets it go.

struct Exported {
  void* data;
  Device device;
  DataType dtype;
  std::vector<std::int64_t> shape;  // C-contiguous
};

// Keeps `owner` until its deleter is called, by whatever thread, with the GIL or without. Of
// version 1.0, or without a version. A new reference; null with a Python error set.
PyObject* make_capsule(const Exported& tensor, std::shared_ptr<const void> owner, bool versioned);

}  // namespace pycollective::dlpack

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
