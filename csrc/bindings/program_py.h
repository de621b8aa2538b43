// A schedule's program, as Python hands it to the engine.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "engine/communicator.h"
#include "engine/plans/program.h"

namespace pycollective {

struct ProgramHandle {
  std::shared_ptr<const Program> program;
};

// Asks `programs` (pycollective.planning.programs.Programs) for what `auto` means, from any thread.
ProgramChoices::Source program_source(pybind11::object programs);

}  // namespace pycollective
