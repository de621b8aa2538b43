// A kernel for each dtype and reduce operation that the contract defines: reduce_<dtype>_<op>.
#include "cuda/reduce.h"

#include "cuda/each_reduction.h"

namespace pycollective::cuda {

#define REDUCE(name, kType, op, kOp, Codec, ...)           \
  static_assert(fits<Dtype::kType, ReduceOp::kOp, Codec>); \
  KERNEL(reduce_##name##_##op, ReduceParameters) { reduce_all<Codec, __VA_ARGS__>(p); }

EACH_REDUCTION(REDUCE)

}  // namespace pycollective::cuda
