#include "cuda/nvrtc.h"

#include <dlfcn.h>

#include <cstdint>
#include <cstdlib>
#include <stdexcept>

namespace pycollective::cuda {

// Results are nvrtcResult, 0 for success; a program is an opaque pointer.
struct Nvrtc::Functions {
  int (*version)(int*, int*);
  const char* (*error)(int);
  int (*architectures)(int*);
  int (*architecture_count)(int*);
  int (*create)(void**, const char*, const char*, int, const char* const*, const char* const*);
  int (*destroy)(void**);
  int (*compile)(void*, int, const char* const*);
  int (*log_size)(void*, std::size_t*);
  int (*log)(void*, char*);
  int (*cubin_size)(void*, std::size_t*);
  int (*cubin)(void*, char*);
  int (*ptx_size)(void*, std::size_t*);
  int (*ptx)(void*, char*);
};

namespace {

constexpr const char* kVariable = "PYCOLLECTIVE_NVRTC";
constexpr const char* kNames[] = {"libnvrtc.so.13", "libnvrtc.so.12"};

std::string environment(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

std::vector<std::string> candidates(const std::vector<std::string>& folders) {
  if (const std::string named = environment(kVariable); !named.empty()) return {named};
  std::vector<std::string> places;
  for (const std::string& folder : folders) places.push_back(folder + "/");
  places.emplace_back("");  // where the loader looks
  for (const char* const home : {"CUDA_HOME", "CUDA_PATH"})
    if (const std::string path = environment(home); !path.empty())
      places.push_back(path + "/lib64/");
  places.emplace_back("/usr/local/cuda/lib64/");
  std::vector<std::string> files;
  for (const char* const name : kNames)
    for (const std::string& place : places) files.push_back(place + name);
  return files;
}

std::string cure(int driver_version) {
  const std::string major = std::to_string(driver_version >= 13000 ? 13 : 12);
  return "install NVRTC (pip install " +
         std::string(major == "12" ? "nvidia-cuda-nvrtc-cu12" : "'nvidia-cuda-nvrtc>=13,<14'") +
         "), or build pycollective where nvcc is";
}

// NVRTC's functions end with their program, whatever happens between.
template <class Functions>
struct Program {
  const Functions& nvrtc;
  void* handle = nullptr;
  ~Program() {
    if (handle != nullptr) nvrtc.destroy(&handle);
  }
  void check(int result, const char* function) const {
    if (result != 0) throw std::runtime_error(std::string(function) + ": " + nvrtc.error(result));
  }
  Bytes read(int (*size_of)(void*, std::size_t*), int (*get)(void*, char*),
             const char* function) const {
    std::size_t size = 0;
    check(size_of(handle, &size), function);
    Bytes bytes(size);
    if (size > 0) check(get(handle, bytes.data()), function);
    return bytes;
  }
};

}  // namespace

Nvrtc::Nvrtc(const std::vector<std::string>& folders, int driver_version) {
  const bool named = !environment(kVariable).empty();
  std::string refused;  // why it was none of those that there are
  for (const std::string& file : candidates(folders)) {
    void* const opened = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (opened == nullptr) {
      if (named) refused += std::string(kVariable) + ": " + dlerror() + "; ";
      continue;
    }
    const auto functions = std::make_shared<Functions>();
    std::string missing;
    const auto find = [&](const char* name, auto& function) {
      void* const found = dlsym(opened, name);
      if (found == nullptr && missing.empty()) missing = name;
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(found);
    };
    find("nvrtcVersion", functions->version);
    find("nvrtcGetErrorString", functions->error);
    find("nvrtcGetSupportedArchs", functions->architectures);
    find("nvrtcGetNumSupportedArchs", functions->architecture_count);
    find("nvrtcCreateProgram", functions->create);
    find("nvrtcDestroyProgram", functions->destroy);
    find("nvrtcCompileProgram", functions->compile);
    find("nvrtcGetProgramLogSize", functions->log_size);
    find("nvrtcGetProgramLog", functions->log);
    find("nvrtcGetCUBINSize", functions->cubin_size);
    find("nvrtcGetCUBIN", functions->cubin);
    find("nvrtcGetPTXSize", functions->ptx_size);
    find("nvrtcGetPTX", functions->ptx);
    if (missing.empty() && functions->version(&major_, &minor_) != 0) missing = "version";
    if (missing.empty() && major_ <= driver_version / 1000) {
      // It looks for its other half by name alone, in vain where it lies in a wheel.
      const std::string folder = file.substr(0, file.rfind('/') + 1);
      if (!folder.empty())
        dlopen((folder + "libnvrtc-builtins.so." + version()).c_str(), RTLD_NOW | RTLD_LOCAL);
      library_ = file;
      functions_ = functions;
      return;
    }
    refused +=
        file + (missing.empty() ? " is NVRTC " + version() + ", newer than the driver; "
                                : " is no NVRTC of 12 or later: it has no " + missing + "; ");
    dlclose(opened);
  }
  throw std::runtime_error("no NVRTC to compile CUDA kernels with: " + refused +
                           cure(driver_version));
}

std::string Nvrtc::version() const { return std::to_string(major_) + "." + std::to_string(minor_); }

std::string Nvrtc::architecture(int major, int minor) const {
  int count = 0;
  if (functions_->architecture_count(&count) != 0) count = 0;
  std::vector<int> all(static_cast<std::size_t>(count));
  if (count > 0 && functions_->architectures(all.data()) != 0) all.clear();
  const int wanted = 10 * major + minor;
  int best = 0;
  for (const int one : all)
    if (one <= wanted && one > best) best = one;
  if (best == 0)
    throw std::runtime_error("NVRTC " + version() + " (" + library_ +
                             ") compiles nothing for a GPU of compute capability " +
                             std::to_string(major) + "." + std::to_string(minor));
  // Code runs on later GPUs of its own major number alone.
  return (best / 10 == major ? "sm_" : "compute_") + std::to_string(best);
}

Bytes Nvrtc::compile(const EmbeddedModule& module, const std::string& architecture) const {
  const char* text = nullptr;
  std::vector<const char*> names, texts;
  for (const EmbeddedSource& source : embedded().sources) {
    if (std::string(source.name) == module.source) text = source.text;
    names.push_back(source.name);
    texts.push_back(source.text);
  }
  // Functions without a word on where they run are kernels': constexpr ones of shared headers.
  const std::string arch = "-arch=" + architecture;
  std::vector<const char*> flags = {arch.c_str(), "-default-device"};
  flags.insert(flags.end(), embedded().flags.begin(), embedded().flags.end());
  Program<Functions> program{*functions_};
  program.check(functions_->create(&program.handle, text, module.source,
                                   static_cast<int>(names.size()), texts.data(), names.data()),
                "nvrtcCreateProgram");
  const int result =
      functions_->compile(program.handle, static_cast<int>(flags.size()), flags.data());
  const Bytes log = program.read(functions_->log_size, functions_->log, "nvrtcGetProgramLog");
  const std::string said = log.empty() ? "" : std::string(log.data());
  if (result != 0)  // with a log and no error it has warned, such as of an old architecture
    throw std::runtime_error("NVRTC " + version() + " (" + library_ + ") does not compile " +
                             module.source + " for " + architecture + ": " +
                             functions_->error(result) + "\n" + said);
  if (architecture.compare(0, 3, "sm_") == 0)
    return program.read(functions_->cubin_size, functions_->cubin, "nvrtcGetCUBIN");
  return program.read(functions_->ptx_size, functions_->ptx, "nvrtcGetPTX");
}

std::string digest_of(const EmbeddedModule& module, const Nvrtc& compiler,
                      const std::string& architecture) {
  // FNV-1a, twice: it tells versions apart, and need not resist anybody.
  std::uint64_t digests[2] = {0xCBF29CE484222325, 0x84222325CBF29CE4};
  const auto add = [&](const std::string& part) {
    for (std::uint64_t& digest : digests) {
      for (const char c : part) digest = (digest ^ static_cast<unsigned char>(c)) * 0x100000001B3;
      digest = (digest ^ 0x100) * 0x100000001B3;  // where the part ends
    }
  };
  add(module.name);
  add(compiler.version());
  add(architecture);
  for (const char* const flag : embedded().flags) add(flag);
  for (const EmbeddedSource& source : embedded().sources) {
    add(source.name);
    add(source.text);
  }
  std::string digits;
  for (const std::uint64_t digest : digests)
    for (int shift = 60; shift >= 0; shift -= 4) digits += "0123456789abcdef"[digest >> shift & 15];
  return digits;
}

}  // namespace pycollective::cuda
