// The kernels of one context: loaded once, before any is needed, because loading one later may wait
// for the GPU to drain, beside a kernel that waits for a peer.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cuda/driver.h"
#include "cuda/program_parameters.h"
#include "dtype.h"

namespace pycollective::cuda {

struct Kernel {
  CUfunction function = nullptr;  // null: the contract has no such reduction
  int threads = 0;                // of a block
  int blocks = 0;                 // of that size, as many as fit the device at once
};

class Kernels {
 public:
  // Into the thread's current context, which is of this device. `nvrtc_folders`: where NVRTC may
  // be, beside the usual places. Throws std::runtime_error where there are no images.
  // At the end the same context must be current, or gone.
  Kernels(const DeviceTraits& device, const std::vector<std::string>& nvrtc_folders);

  // Interprets programs that combine so.
  const Kernel& program(Dtype dtype, ReduceOp op) const {
    return program_[static_cast<int>(dtype)][static_cast<int>(op)];
  }
  // Interprets programs that combine nothing.
  const Kernel& moving_program() const { return moving_program_; }
  // Blocks of any of these that a process may have wait at once, all its communicators together:
  // as many as fit a quarter of the device, and at least 1.
  int blocks_that_wait() const;

 private:
  struct Unload {
    void operator()(CUmodule module) const;
  };

  std::unique_ptr<CUmod_st, Unload> module_;
  Kernel program_[kDtypes][kReduceOps];
  Kernel moving_program_;
};

// Puts one interpreter of a program on the stream; `p` may go when it returns. The context is
// current. All of its blocks must fit the device beside whatever else waits there.
void launch_program(const Kernel& kernel, const ProgramParameters& p, unsigned blocks,
                    CUstream stream);

}  // namespace pycollective::cuda
