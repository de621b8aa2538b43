// NVIDIA's compiler as a library, opened at run time: for installs that were built without nvcc.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cuda/embedded.h"

namespace pycollective::cuda {

using Bytes = std::vector<char>;

class Nvrtc {
 public:
  // The first NVRTC, of 13 then 12, that is no newer than the driver (13000 is CUDA 13.0): the file
  // that PYCOLLECTIVE_NVRTC names, else one in `folders`, where the loader looks, or in a CUDA
  // toolkit. Throws std::runtime_error that says what to install.
  Nvrtc(const std::vector<std::string>& folders, int driver_version);

  const std::string& library() const { return library_; }
  std::string version() const;  // "13.0"

  // What the module is compiled for, on a GPU of this compute capability: "sm_90", or, where this
  // NVRTC is older than the GPU, "compute_90", PTX for the driver to compile.
  std::string architecture(int major, int minor) const;

  // The module's image. Throws std::runtime_error with the compiler's own words.
  Bytes compile(const EmbeddedModule& module, const std::string& architecture) const;

 private:
  struct Functions;
  std::string library_;
  int major_ = 0, minor_ = 0;
  std::shared_ptr<const Functions> functions_;  // of a library that stays open
};

// The digest of all that an image is made of, in hexadecimal digits.
std::string digest_of(const EmbeddedModule& module, const Nvrtc& compiler,
                      const std::string& architecture);

}  // namespace pycollective::cuda
