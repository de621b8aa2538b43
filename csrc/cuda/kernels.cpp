#include "cuda/kernels.h"

#include <algorithm>
#include <cstdint>
#include <stdexcept>

#include "cuda/embedded.h"
#include "cuda/images.h"

namespace pycollective::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kShareThatWaits = 4;  // of a device: one of so many parts

Kernel fetch(CUmodule module, const std::string& name, int wanted_threads, int most_threads,
             int multiprocessors) {
  Kernel kernel;
  check(driver().cuModuleGetFunction(&kernel.function, module, name.c_str()),
        ("cuModuleGetFunction of " + name).c_str());
  int most = 0;
  check(
      driver().cuFuncGetAttribute(&most, CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, kernel.function),
      "cuFuncGetAttribute");
  kernel.threads = std::min({wanted_threads, most_threads, most});
  int blocks = 0;
  check(driver().cuOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel.function,
                                                             kernel.threads, 0),
        "cuOccupancyMaxActiveBlocksPerMultiprocessor");
  kernel.blocks = blocks * multiprocessors;
  if (kernel.blocks < 1) throw std::runtime_error("no block of " + name + " fits the GPU");
  return kernel;
}

}  // namespace

Kernels::Kernels(const DeviceTraits& device, const std::vector<std::string>& nvrtc_folders) {
  CUdevice handle = 0;
  check(driver().cuDeviceGet(&handle, device.ordinal), "cuDeviceGet");
  int most_threads = 0;
  check(driver().cuDeviceGetAttribute(&most_threads, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK,
                                      handle),
        "cuDeviceGetAttribute");
  CUmodule module = nullptr;
  load_image(embedded().program, {device.major, device.minor, driver().version}, nvrtc_folders,
             [&](const void* image) {
               check(driver().cuModuleLoadDataEx(&module, image, 0, nullptr, nullptr),
                     "cuModuleLoadDataEx");
             });
  module_.reset(module);
  const auto fetch_named = [&](const std::string& name) {
    return fetch(module, "program_" + name, kThreads, most_threads, device.multiprocessors);
  };
  for (const DtypeTraits& dtype : kDtypeTable)
    for (const ReduceOpTraits& op : kReduceOpTable)
      if (is_defined(dtype.dtype, op.op))
        program_[static_cast<int>(dtype.dtype)][static_cast<int>(op.op)] =
            fetch_named(std::string(dtype.name) + "_" + op.name);
  moving_program_ = fetch_named("move");
}

int Kernels::blocks_that_wait() const {
  int fewest = moving_program_.blocks;
  for (const auto& kernels : program_)
    for (const Kernel& kernel : kernels)
      if (kernel.function != nullptr) fewest = std::min(fewest, kernel.blocks);
  return std::max(fewest / kShareThatWaits, 1);
}

void Kernels::Unload::operator()(CUmodule module) const {
  // Nothing is left to unload where the context is gone, and nothing can be done about it.
  static_cast<void>(driver().cuModuleUnload(module));
}

void launch_program(const Kernel& kernel, const ProgramParameters& p, unsigned blocks,
                    CUstream stream) {
  // A thread for each member.
  if (kernel.threads < static_cast<int>(p.members))
    throw std::runtime_error("blocks of " + std::to_string(kernel.threads) +
                             " threads cannot wait for " + std::to_string(p.members) + " ranks");
  void* all[] = {const_cast<ProgramParameters*>(&p)};
  check(
      driver().cuLaunchKernel(kernel.function, blocks, 1, 1, static_cast<unsigned>(kernel.threads),
                              1, 1, 0, stream, all, nullptr),
      "cuLaunchKernel");
}

}  // namespace pycollective::cuda
