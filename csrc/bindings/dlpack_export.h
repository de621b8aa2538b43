// A DLPack capsule over memory of a GPU, for a consumer that takes it over or lets it go.
#pragma once

#include <Python.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "bindings/dlpack_abi.h"

namespace pycollective::dlpack {

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
