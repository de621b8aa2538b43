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

// Has `planner` (pycollective.planning.planner.Planner) make plans, from any thread, and choose
// where it `chooses`. What it raises is a CollectiveFailure (kConfiguration).
PlanCache::Source plan_source(pybind11::object planner, bool chooses);

}  // namespace pycollective
