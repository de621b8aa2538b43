// The heart of the DDP hook: one bucket averaged by the contract.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "torch/flight.h"

namespace pycollective::shim {

// Starts the average of `bucket` over `group`, in place; the future's value is `result`. Raises if
// another backend serves the bucket's device: its average would be another one.
c10::intrusive_ptr<Future> average(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                   const at::Tensor& bucket, c10::IValue result);

}  // namespace pycollective::shim
