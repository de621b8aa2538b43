// The Python object of a communicator, for the files that implement its type.
#pragma once

#include <Python.h>

#include <memory>

#include "bindings/errors_py.h"
#include "bindings/kept_arrays.h"
#include "bindings/work_py.h"
#include "engine/communicator.h"

namespace pycollective {

struct CommunicatorObject {
  PyObject_HEAD std::shared_ptr<Communicator>* core;
  std::shared_ptr<AbandonedCalls>* abandoned;
  std::shared_ptr<KeptArrays>* kept;

  static CommunicatorObject& of(PyObject* self) {
    return *reinterpret_cast<CommunicatorObject*>(self);
  }
  // nullptr with a Python error set where __init__ has not run.
  static Communicator* core_of(PyObject* self) {
    if (of(self).core == nullptr) {
      raise_configuration_error("the communicator was never initialised");
      return nullptr;
    }
    return of(self).core->get();
  }
};

// The collectives as methods. The type adds its own, and an empty one as the end.
constexpr int kCollectiveMethods = 11;
extern const PyMethodDef collective_methods[kCollectiveMethods];

}  // namespace pycollective
