// Where a module's image comes from.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "cuda/embedded.h"

namespace pycollective::cuda {

struct GpuTraits {
  int major, minor;    // compute capability
  int driver_version;  // 13000: CUDA 13.0
};

// Has NVRTC make, now, what load_image() would have it make while other ranks wait: the image, if
// nvcc made none. It is kept in this process, as is why it could not be made: load_image() throws
// it, once. Thread-safe. Throws std::runtime_error: there is no NVRTC for this GPU.
void prepare_images(const GpuTraits& gpu, const std::vector<std::string>& nvrtc_folders);

// Loads the module by `load`, from the first of these that works, and returns in words which:
//   1. <module>.fatbin in the folder that PYCOLLECTIVE_CUDA_IMAGES names, and then nothing else;
//   2. what nvcc made when this library was built, if it was there;
//   3. what NVRTC makes now, or made earlier: prepare_images(), or the user's cache folder, keeps
//   it.
// `load` throws DriverError. Where it says that the image does not suit (an old driver takes none
// of a newer nvcc), the next is tried; any other is thrown on as it is. Throws std::runtime_error
// that says what to install.
std::string load_image(const EmbeddedModule& module, const GpuTraits& gpu,
                       const std::vector<std::string>& nvrtc_folders,
                       const std::function<void(const void* image)>& load);

// The same in words, without a GPU or a word to it: where images would come from. Throws alike.
std::string describe_images(int driver_version, const std::vector<std::string>& nvrtc_folders);

// Where what NVRTC has made is kept from one program to the next: $XDG_CACHE_HOME/pycollective or
// ~/.cache/pycollective; "" where a user has neither.
std::string cache_folder();

}  // namespace pycollective::cuda
