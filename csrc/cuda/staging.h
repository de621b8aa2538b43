// The host's side of one call on a GPU's memory: pinned memory, and the copies to and from it.
//
// The copies run on a stream of their own, which waits for what was on the caller's stream at the
// call and for nothing later. Bytes: the input's once from the device, the output's once to it.
#pragma once

#include <cstddef>
#include <vector>

#include "cuda/gpu.h"

namespace pycollective::cuda {

class Staging {
 public:
  struct Sizes {
    std::size_t input = 0;  // bytes
    std::size_t output = 0;
    bool in_place = false;  // the output's memory here is the input's
  };

  // Hands over the copy of `input` to the host. `stream` is the caller's. Throws DriverError, and
  // std::invalid_argument where that stream is being captured.
  Staging(Gpu& gpu, CUstream stream, const void* input, const Sizes& sizes);
  // A copy out that is under way is waited for, since the caller may free what it writes to; one
  // to the host keeps its memory here and goes on.
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  void* input() const { return input_.data; }
  void* output() const { return sizes_.in_place ? input_.data : output_.data; }

  // Whether what was handed over is done. Throws DriverError where it failed.
  bool done();
  // Hands over the copy of the output to the device. Once, after done().
  void copy_out(void* to);

 private:
  void copy(CUdeviceptr to, CUdeviceptr from, std::size_t bytes);

  Gpu& gpu_;
  Sizes sizes_;
  Lane lane_;
  Pinned input_;
  Pinned output_;
  bool under_way_ = false;
  bool copies_out_ = false;
};

}  // namespace pycollective::cuda
