#include "cuda/images.h"

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <optional>
#include <stdexcept>

#include "cuda/driver.h"
#include "cuda/image_cache.h"
#include "cuda/nvrtc.h"

namespace pycollective::cuda {
namespace {

constexpr const char* kVariable = "PYCOLLECTIVE_CUDA_IMAGES";

std::optional<std::string> named_folder() {
  const char* const folder = std::getenv(kVariable);
  if (folder == nullptr || *folder == '\0') return std::nullopt;
  return folder;
}

Bytes read_image(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file)
    throw std::runtime_error("no CUDA kernels: cannot read " + path + ", in the folder that " +
                             kVariable + " names");
  Bytes bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  bytes.push_back('\0');  // PTX is a text
  return bytes;
}

std::string compiled_for() {
  return "compiled by nvcc for " + std::string(embedded().architectures);
}

std::string why_nvcc_made_none() {
  const std::string why = embedded().nvcc_failure;
  return why.empty() ? "" : "; nvcc failed when pycollective was built: " + why;
}

std::string why_none_is_kept() {
  const std::string why = cache_refusal();
  return why.empty() ? "" : "; not kept, as " + why;
}

// Whether the driver refused the image for what it is: of another GPU, of a newer compiler, or PTX
// that this driver cannot or may not compile. All else says nothing of the image.
bool refuses_image(const DriverError& error) {
  switch (error.result()) {
    case CUDA_ERROR_INVALID_IMAGE:
    case CUDA_ERROR_NO_BINARY_FOR_GPU:
    case CUDA_ERROR_INVALID_PTX:
    case CUDA_ERROR_JIT_COMPILER_NOT_FOUND:
    case CUDA_ERROR_UNSUPPORTED_PTX_VERSION:
    case CUDA_ERROR_JIT_COMPILATION_DISABLED:
      return true;
    default:
      return false;
  }
}

}  // namespace

std::string load_image(const EmbeddedModule& module, const GpuTraits& gpu,
                       const std::vector<std::string>& nvrtc_folders,
                       const std::function<void(const void* image)>& load) {
  if (const auto folder = named_folder()) {
    const std::string path = *folder + "/" + module.name + ".fatbin";
    load(read_image(path).data());
    return path;
  }
  std::string refused = why_nvcc_made_none();
  if (module.image != nullptr) {
    try {
      load(module.image);
      return compiled_for();
    } catch (const DriverError& error) {
      if (!refuses_image(error)) throw;
      refused = "; the driver refused those of nvcc: " + std::string(error.what());
    }
  }
  try {
    const Nvrtc compiler(nvrtc_folders, gpu.driver_version);
    const std::string architecture = compiler.architecture(gpu.major, gpu.minor);
    const std::string name = std::string(module.name) + "-" + architecture + "-" +
                             digest_of(module, compiler, architecture);
    const std::string origin = "NVRTC " + compiler.version() + " for " + architecture;
    if (const auto cached = load_cached(name)) {
      load(cached->data());
      return origin + ", from " + cache_folder();
    }
    const Bytes made = compiler.compile(module, architecture);
    load(made.data());
    store_cached(name, made);
    return origin + why_none_is_kept();
  } catch (const DriverError& error) {
    if (!refuses_image(error)) throw;
    throw DriverError(error.result(), error.what() + refused);
  } catch (const std::runtime_error& error) {
    throw std::runtime_error(error.what() + refused);
  }
}

std::string describe_images(int driver_version, const std::vector<std::string>& nvrtc_folders) {
  if (const auto folder = named_folder()) return *folder;
  if (*embedded().architectures != '\0') return compiled_for();
  try {
    const Nvrtc compiler(nvrtc_folders, driver_version);
    return "NVRTC " + compiler.version() + " when first needed (" + compiler.library() + ")" +
           why_none_is_kept() + why_nvcc_made_none();
  } catch (const std::runtime_error& error) {
    throw std::runtime_error(error.what() + why_nvcc_made_none());
  }
}

}  // namespace pycollective::cuda
