#include "torch/average.h"

#include <utility>
#include <vector>

namespace pycollective::shim {

c10::intrusive_ptr<Future> average(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                   const at::Tensor& bucket, c10::IValue result) {
  const std::string backend = group->getBackend(bucket.device().type())->getBackendName();
  TORCH_CHECK_VALUE(backend == "pycollective",
                    "all_reduce_hook needs a process group of the pycollective backend for ",
                    bucket.device(), ", not of ", backend);
  std::vector<at::Tensor> tensors{bucket};
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::AVG;
  const c10::TypePtr type = result.type();
  return group->allreduce(tensors, options)
      ->getFuture()
      ->then(
          [result = std::move(result)](Future& done) {
            done.value();  // or its error
            return result;
          },
          type);
}

}  // namespace pycollective::shim
