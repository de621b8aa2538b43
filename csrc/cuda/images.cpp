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

}  // namespace

std::string load_image(const EmbeddedModule& module, const GpuTraits& gpu,
                       const std::vector<std::string>& nvrtc_folders,
                       const std::function<void(const void* image)>& load) {
  if (const auto folder = named_folder()) {
    const std::string path = *folder + "/" + module.name + ".fatbin";
    load(read_image(path).data());
    return path;
  }
  std::string refused;
  if (module.image != nullptr) {
    try {
      load(module.image);
      return compiled_for();
    } catch (const DriverError& error) {
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
    return origin;
  } catch (const std::runtime_error& error) {
    throw std::runtime_error(error.what() + refused);
  }
}

std::string describe_images(int driver_version, const std::vector<std::string>& nvrtc_folders) {
  if (const auto folder = named_folder()) return *folder;
  if (*embedded().architectures != '\0') return compiled_for();
  const Nvrtc compiler(nvrtc_folders, driver_version);
  return "NVRTC " + compiler.version() + " when first needed (" + compiler.library() + ")";
}

}  // namespace pycollective::cuda
