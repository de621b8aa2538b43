#include "cuda/kernels.h"

#include <algorithm>
#include <cstdint>
#include <stdexcept>

#include "cuda/embedded.h"
#include "cuda/images.h"

namespace pycollective::cuda {
namespace {

constexpr int kReduceThreads = 256;
constexpr int kProgramThreads = 512;
constexpr int kShareThatWaits = 4;  // of a device: one of so many parts
constexpr std::uint64_t kVectorBytes = 16;

bool is_named(const EmbeddedModule& module, const char* name) {
  return std::string(module.name) == name;
}

// How many threads have something to do: a vector each, or an element where the pointers are not
// aligned alike.
std::uint64_t shares(const ReduceParameters& p, std::size_t element) {
  const auto misaligned = [](const void* pointer) {
    return reinterpret_cast<std::uintptr_t>(pointer) % kVectorBytes;
  };
  bool alike = p.copy == nullptr || misaligned(p.copy) == misaligned(p.out);
  for (int leaf = 0; leaf < p.n; ++leaf)
    alike = alike && misaligned(p.leaves[leaf]) == misaligned(p.out);
  return alike ? p.count * element / kVectorBytes + 1 : p.count;
}

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

// `parameters` are read before it returns.
void launch(const Kernel& kernel, const void* parameters, unsigned blocks, CUstream stream) {
  void* all[] = {const_cast<void*>(parameters)};
  check(
      driver().cuLaunchKernel(kernel.function, blocks, 1, 1, static_cast<unsigned>(kernel.threads),
                              1, 1, 0, stream, all, nullptr),
      "cuLaunchKernel");
}

}  // namespace

Kernels::Kernels(const DeviceTraits& device, const std::vector<std::string>& nvrtc_folders) {
  CUdevice handle = 0;
  check(driver().cuDeviceGet(&handle, device.ordinal), "cuDeviceGet");
  int most_threads = 0;
  check(driver().cuDeviceGetAttribute(&most_threads, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK,
                                      handle),
        "cuDeviceGetAttribute");
  for (const EmbeddedModule& source : embedded().modules) {
    CUmodule module = nullptr;
    origin_ = load_image(source, {device.major, device.minor, driver().version}, nvrtc_folders,
                         [&](const void* image) {
                           check(driver().cuModuleLoadDataEx(&module, image, 0, nullptr, nullptr),
                                 "cuModuleLoadDataEx");
                         });
    modules_.emplace_back(module);
    const auto fetch_each = [&](Kernel(&kernels)[kDtypes][kReduceOps], int threads) {
      for (const DtypeTraits& dtype : kDtypeTable)
        for (const ReduceOpTraits& op : kReduceOpTable)
          if (is_defined(dtype.dtype, op.op))
            kernels[static_cast<int>(dtype.dtype)][static_cast<int>(op.op)] =
                fetch(module, std::string(source.name) + "_" + dtype.name + "_" + op.name, threads,
                      most_threads, device.multiprocessors);
    };
    if (is_named(source, "reduce")) {
      fetch_each(reduce_, kReduceThreads);
    } else if (is_named(source, "program")) {
      fetch_each(program_, kProgramThreads);
      moving_program_ =
          fetch(module, "program_move", kProgramThreads, most_threads, device.multiprocessors);
    }
  }
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

void launch_reduce(const Kernels& kernels, Dtype dtype, ReduceOp op, const ReduceParameters& p,
                   CUstream stream) {
  const Kernel& kernel = kernels.reduce(dtype, op);
  if (kernel.function == nullptr)
    throw std::invalid_argument(std::string(name_of(op)) + " has no meaning for " + name_of(dtype));
  if (p.n < 1 || p.n > kMostLeaves)
    throw std::invalid_argument("a reduction of " + std::to_string(p.n) +
                                " leaves; it takes 1 to " + std::to_string(kMostLeaves));
  if (p.count == 0) return;
  const auto threads = static_cast<std::uint64_t>(kernel.threads);
  const std::uint64_t needed = (shares(p, size_of(dtype)) + threads - 1) / threads;
  const auto blocks =
      static_cast<unsigned>(std::min(needed, static_cast<std::uint64_t>(kernel.blocks)));
  launch(kernel, &p, blocks, stream);
}

void launch_program(const Kernel& kernel, const ProgramParameters& p, unsigned blocks,
                    CUstream stream) {
  // A thread for each member.
  if (kernel.threads < static_cast<int>(p.members))
    throw std::runtime_error("blocks of " + std::to_string(kernel.threads) +
                             " threads cannot wait for " + std::to_string(p.members) + " ranks");
  launch(kernel, &p, blocks, stream);
}

}  // namespace pycollective::cuda
