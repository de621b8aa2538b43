// A schedule's program, as Python hands it to the engine.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "engine/program.h"

namespace pycollective {

struct ProgramHandle {
  std::shared_ptr<const Program> program;
};

void bind_program(pybind11::module_& module);

}  // namespace pycollective
