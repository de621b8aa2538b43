// Modules: any image that begins as one does; its functions are the emulated kernels.
#include <cstdint>
#include <cstring>
#include <map>
#include <string>

#include "handles.h"
#include "launch.h"
#include "stream.h"

namespace standin {
namespace {

struct Function {
  const Kernel* kernel;
  std::weak_ptr<struct Module> module;
  std::shared_ptr<Context> context;
};

struct Module {
  std::shared_ptr<Context> context;
  std::mutex mutex;
  std::map<std::string, CUfunction> functions;
};

Handles<CUmodule, Module>& modules() {
  static auto* const all = new Handles<CUmodule, Module>(6);
  return *all;
}
Handles<CUfunction, Function>& functions() {
  static auto* const all = new Handles<CUfunction, Function>(7);
  return *all;
}

// Its magic number, or what PTX begins with.
bool is_image(const void* image) {
  const auto* const text = static_cast<const char*>(image);
  const std::uint32_t fatbin = 0xba55ed50;
  return std::memcmp(text, &fatbin, 4) == 0 || std::memcmp(text, "\177ELF", 4) == 0 ||
         std::strncmp(text, "//", 2) == 0 || std::strncmp(text, ".ver", 4) == 0;
}

std::shared_ptr<Function> find_function(const std::shared_ptr<Context>& context,
                                        CUfunction handle) {
  std::shared_ptr<Function> function = functions().find(handle);
  return function && function->context == context ? function : nullptr;
}

struct alignas(64) Line {
  char bytes[64];
};

}  // namespace
}  // namespace standin

using namespace standin;

CUresult cuModuleLoadDataEx(CUmodule* out, const void* image, unsigned, CUjit_option*, void**) {
  return call(Safety::kUnsafe, [&](const std::shared_ptr<Context>& context) {
    if (!out || !image) return CUDA_ERROR_INVALID_VALUE;
    if (!is_image(image)) return CUDA_ERROR_INVALID_IMAGE;
    synchronise(*context);  // loading code may wait for the device to drain: here it always does
    auto module = std::make_shared<Module>();
    module->context = context;
    *out = modules().add(std::move(module));
    return CUDA_SUCCESS;
  });
}

CUresult cuModuleUnload(CUmodule handle) {
  return call(Safety::kUnsafe, [&](const std::shared_ptr<Context>& context) {
    const std::shared_ptr<Module> module = modules().find(handle);
    if (!module || module->context != context) return CUDA_ERROR_INVALID_HANDLE;
    synchronise(*context);
    modules().remove(handle);
    for (const auto& [name, function] : module->functions) functions().remove(function);
    return CUDA_SUCCESS;
  });
}

CUresult cuModuleGetFunction(CUfunction* out, CUmodule handle, const char* name) {
  return call(Safety::kUnsafe, [&](const std::shared_ptr<Context>& context) {
    const std::shared_ptr<Module> module = modules().find(handle);
    if (!module || module->context != context) return CUDA_ERROR_INVALID_HANDLE;
    if (!out || !name) return CUDA_ERROR_INVALID_VALUE;
    const Kernel* const kernel = find_kernel(name);
    if (!kernel) return CUDA_ERROR_NOT_FOUND;
    const std::lock_guard lock(module->mutex);
    const auto known = module->functions.find(name);
    if (known != module->functions.end()) {
      *out = known->second;
      return CUDA_SUCCESS;
    }
    synchronise(*context);  // lazy loading
    *out = functions().add(std::make_shared<Function>(Function{kernel, module, context}));
    module->functions.emplace(name, *out);
    return CUDA_SUCCESS;
  });
}

CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction handle) {
  return call(Safety::kSafe, [&](const std::shared_ptr<Context>& context) {
    if (!find_function(context, handle)) return CUDA_ERROR_INVALID_HANDLE;
    if (!value || attribute != CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)
      return CUDA_ERROR_INVALID_VALUE;
    *value = kThreadsOfBlock;
    return CUDA_SUCCESS;
  });
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction handle, int threads,
                                                     size_t shared_bytes) {
  return call(Safety::kSafe, [&](const std::shared_ptr<Context>& context) {
    if (!find_function(context, handle)) return CUDA_ERROR_INVALID_HANDLE;
    if (!blocks || threads <= 0 || threads > static_cast<int>(kThreadsOfBlock))
      return CUDA_ERROR_INVALID_VALUE;
    *blocks =
        shared_bytes > 0
            ? 0
            : static_cast<int>(std::min(kThreadsOfMultiprocessor / static_cast<unsigned>(threads),
                                        kBlocksOfMultiprocessor));
    return CUDA_SUCCESS;
  });
}

CUresult cuLaunchKernel(CUfunction handle, unsigned grid, unsigned grid_y, unsigned grid_z,
                        unsigned block, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                        CUstream stream_handle, void** parameters, void** extra) {
  return call(Safety::kSafe, [&](const std::shared_ptr<Context>& context) {
    const std::shared_ptr<Function> function = find_function(context, handle);
    const std::shared_ptr<Stream> stream = find_stream(context, stream_handle);
    if (!function || !stream) return CUDA_ERROR_INVALID_HANDLE;
    // device.h knows one dimension, one parameter, and shared memory of a fixed size.
    if (grid == 0 || grid > 65535 || grid_y != 1 || grid_z != 1 || block == 0 ||
        block > kThreadsOfBlock || block_y != 1 || block_z != 1 || shared_bytes != 0 ||
        !parameters || extra)
      return CUDA_ERROR_INVALID_VALUE;
    const Kernel* const kernel = function->kernel;
    std::vector<Line> copy((kernel->parameter_bytes + sizeof(Line) - 1) / sizeof(Line));
    std::memcpy(copy.data(), parameters[0], kernel->parameter_bytes);
    return submit(stream,
                  [kernel, grid, block, copy = std::move(copy)](Context& its, Random& random) {
                    run_kernel(*kernel, copy.data(), grid, block, its, random);
                  });
  });
}
