// A kernel for each dtype and reduce operation that interprets programs, program_<dtype>_<op>; and
// program_move, for programs that combine nothing.
#include "cuda/program.h"

#include "cuda/each_reduction.h"

namespace pycollective::cuda {

KERNEL(program_move, ProgramParameters) { run_program<Moving>(p); }

#define PROGRAM(name, kType, op, kOp, Codec, ...)          \
  static_assert(fits<Dtype::kType, ReduceOp::kOp, Codec>); \
  KERNEL(program_##name##_##op, ProgramParameters) {       \
    run_program<Combining<Codec, __VA_ARGS__>>(p);         \
  }

EACH_REDUCTION(PROGRAM)

}  // namespace pycollective::cuda
