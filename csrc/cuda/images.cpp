#include "cuda/images.h"

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <map>
#include <mutex>
#include <optional>
#include <stdexcept>

#include "cuda/driver.h"
#include "cuda/image_cache.h"
#include "cuda/nvrtc.h"
#include "per_process.h"

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

// What NVRTC is to make of a module.
struct Wanted {
  Wanted(const EmbeddedModule& module, const GpuTraits& gpu,
         const std::vector<std::string>& nvrtc_folders)
      : compiler(nvrtc_folders, gpu.driver_version),
        architecture(compiler.architecture(gpu.major, gpu.minor)),
        name(std::string(module.name) + "-" + architecture + "-" +
             digest_of(module, compiler, architecture)),
        origin("NVRTC " + compiler.version() + " for " + architecture) {}
  Nvrtc compiler;
  std::string architecture;
  std::string name;
  std::string origin;
};

struct Prepared {
  Bytes image;
  std::string origin;
  std::string failure;  // in place of an image
};
// What prepare_images() has made.
struct AllPrepared {
  std::mutex mutex;
  std::map<std::string, Prepared> by_name;
};
PerProcess<AllPrepared> prepared_here;

// Under the lock: whoever needs what is being made waits for it.
Prepared prepare(const EmbeddedModule& module, const Wanted& wanted) {
  if (auto cached = load_cached(wanted.name))
    return {std::move(*cached), wanted.origin + ", from " + cache_folder(), ""};
  try {
    Bytes made = wanted.compiler.compile(module, wanted.architecture);
    store_cached(wanted.name, made);
    return {std::move(made), wanted.origin + why_none_is_kept(), ""};
  } catch (const std::runtime_error& error) {
    return {{}, "", error.what()};
  }
}

std::optional<Prepared> find_prepared(const std::string& name) {
  const std::lock_guard lock(prepared_here->mutex);
  auto& all = prepared_here->by_name;
  const auto found = all.find(name);
  if (found == all.end()) return std::nullopt;
  const Prepared prepared = found->second;
  if (prepared.failure.empty()) return prepared;
  all.erase(found);  // who asks again has mended it
  throw std::runtime_error(prepared.failure);
}

}  // namespace

void prepare_images(const GpuTraits& gpu, const std::vector<std::string>& nvrtc_folders) {
  if (named_folder()) return;
  for (const EmbeddedModule& module : embedded().modules) {
    if (module.image != nullptr) continue;
    const Wanted wanted(module, gpu, nvrtc_folders);
    const std::lock_guard lock(prepared_here->mutex);
    auto& all = prepared_here->by_name;
    if (all.count(wanted.name) == 0) all.emplace(wanted.name, prepare(module, wanted));
  }
}

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
    const Wanted wanted(module, gpu, nvrtc_folders);
    if (const auto prepared = find_prepared(wanted.name)) {
      load(prepared->image.data());
      return prepared->origin;
    }
    if (const auto cached = load_cached(wanted.name)) {
      load(cached->data());
      return wanted.origin + ", from " + cache_folder();
    }
    const Bytes made = wanted.compiler.compile(module, wanted.architecture);
    load(made.data());
    store_cached(wanted.name, made);
    return wanted.origin + why_none_is_kept();
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
