// How an array is asked for through DLPack, and what its producer says of writing into it.
#pragma once

#include <Python.h>

#include <optional>

#include "bindings/dlpack_abi.h"

namespace pycollective::dlpack {

enum class Writing {
  kAllowed,
  kReadOnly,
  kIntoCopy,  // what was handed over is a copy: a result would be lost in it
  kNotSaid,   // by a producer without versions
};

// The capsule that `object` hands over, a new reference: of version 1.x where the producer knows
// it, else without a version. Null with a Python error set: ConfigurationError where there is no
// DLPack, or what the producer raised. `name` is for messages. `stream`: of an array on a GPU,
// where the producer must know which stream will use it: DLPack's number of that.
PyObject* ask_for_capsule(PyObject* object, const char* name, std::optional<long long> stream);

// What the capsule holds, borrowed from it. Null with a Python error set.
const Tensor* open_capsule(PyObject* capsule, const char* name, Writing& writing);

// For kNotSaid: 1 where `object` shows in another way that it is immutable, 0 where it does not,
// -1 with a Python error set.
int looks_immutable(PyObject* object);

// Once, when the module is made. False with a Python error set.
bool init_import();

}  // namespace pycollective::dlpack
