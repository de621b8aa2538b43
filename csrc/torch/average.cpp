#include "torch/average.h"

#include <vector>

namespace pycollective::shim {

c10::intrusive_ptr<Future> average(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                   const at::Tensor& bucket) {
  const std::string backend = group->getBackend(bucket.device().type())->getBackendName();
  TORCH_CHECK_VALUE(backend == "pycollective",
                    "all_reduce_hook needs a process group of the pycollective backend for ",
                    bucket.device(), ", not of ", backend);
  std::vector<at::Tensor> tensors{bucket};
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::AVG;
  // In C++, so that the thread which completes a bucket needs no GIL, and an error stays itself.
  return group->allreduce(tensors, options)
      ->getFuture()
      ->then([](Future& done) -> c10::IValue { return done.value().toTensorVector().front(); },
             c10::TensorType::get());
}

}  // namespace pycollective::shim
