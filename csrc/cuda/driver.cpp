#include "cuda/driver.h"

#include <dlfcn.h>

#include <cstdlib>

namespace pycollective::cuda {
namespace {

constexpr const char* kLibrary = "libcuda.so.1";
constexpr const char* kVariable = "PYCOLLECTIVE_CUDA_DRIVER";

[[noreturn]] void refuse_as_too_old(const std::string& library, const char* function) {
  throw DriverUnavailable("the CUDA driver " + library + " is too old: it has no " + function +
                          "; install NVIDIA's driver 525 or later, which is of CUDA 12");
}

void fetch_functions(Driver& driver, void* opened) {
  const auto get = reinterpret_cast<GetProcAddress>(dlsym(opened, kGetProcAddress));
  if (get == nullptr) refuse_as_too_old(driver.library, kGetProcAddress);
  const auto fetch = [&](const char* name, int version) {
    void* function = nullptr;
    CUdriverProcAddressQueryResult found = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    const CUresult result =
        get(name, &function, version, CU_GET_PROC_ADDRESS_LEGACY_STREAM, &found);
    if (result != CUDA_SUCCESS || found != CU_GET_PROC_ADDRESS_SUCCESS || function == nullptr)
      refuse_as_too_old(driver.library, name);
    return function;
  };
#define PYCOLLECTIVE_CUDA_FETCH(name, version, parameters) \
  driver.name = reinterpret_cast<CUresult(*) parameters>(fetch(#name, version));
  PYCOLLECTIVE_CUDA_FUNCTIONS(PYCOLLECTIVE_CUDA_FETCH)
#undef PYCOLLECTIVE_CUDA_FETCH
}

// "cuInit: CUDA_ERROR_UNKNOWN, unknown error"
std::string describe(const Driver& driver, CUresult result, const char* function) {
  const char* name = nullptr;
  const char* text = nullptr;
  if (driver.cuGetErrorName(result, &name) != CUDA_SUCCESS || name == nullptr)
    return std::string(function) + ": error " + std::to_string(static_cast<int>(result));
  if (driver.cuGetErrorString(result, &text) != CUDA_SUCCESS || text == nullptr) text = "";
  return std::string(function) + ": " + name + ", " + text;
}

void initialise(Driver& driver) {
  const auto look = [&](CUresult result, const char* function) {
    if (result == CUDA_SUCCESS) return;
    if (result == CUDA_ERROR_NO_DEVICE)
      throw DriverUnavailable("the CUDA driver " + driver.library +
                              " finds no GPU; see nvidia-smi and "
                              "CUDA_VISIBLE_DEVICES");
    throw DriverUnavailable("the CUDA driver " + driver.library +
                            " does not start: " + describe(driver, result, function) +
                            "; see nvidia-smi, and whether the process was forked from one "
                            "that uses CUDA");
  };
  look(driver.cuInit(0), "cuInit");
  look(driver.cuDriverGetVersion(&driver.version), "cuDriverGetVersion");
  look(driver.cuDeviceGetCount(&driver.devices), "cuDeviceGetCount");
  if (driver.devices == 0) look(CUDA_ERROR_NO_DEVICE, "cuDeviceGetCount");
}

Driver open_driver() {
  const char* const named = std::getenv(kVariable);
  Driver driver;
  driver.library = named != nullptr && *named != '\0' ? named : kLibrary;
  void* const opened = dlopen(driver.library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (opened == nullptr)
    throw DriverUnavailable("no CUDA driver: " + std::string(dlerror()) +
                            "; install NVIDIA's driver, or name its library "
                            "in " +
                            kVariable);
  fetch_functions(driver, opened);
  initialise(driver);
  return driver;
}

}  // namespace

const Driver& driver() {
  // Again by the next call, if it throws. Never taken down: what is unloaded at exit calls it.
  static const Driver& opened = *new Driver(open_driver());
  return opened;
}

void check(CUresult result, const char* function) {
  if (result != CUDA_SUCCESS) throw DriverError(result, describe(driver(), result, function));
}

Current::Current(CUcontext context) {
  check(driver().cuCtxPushCurrent(context), "cuCtxPushCurrent");
  // It fails for a mode that there is not, and for nothing else.
  static_cast<void>(driver().cuThreadExchangeStreamCaptureMode(&captures_));
}

Current::~Current() {
  // It can only fail where the context is gone with its process's last use of it.
  static_cast<void>(driver().cuThreadExchangeStreamCaptureMode(&captures_));
  CUcontext popped = nullptr;
  static_cast<void>(driver().cuCtxPopCurrent(&popped));
}

DeviceTraits device_traits(int ordinal) {
  CUdevice device = 0;
  check(driver().cuDeviceGet(&device, ordinal), "cuDeviceGet");
  const auto attribute = [&](CUdevice_attribute which) {
    int value = 0;
    check(driver().cuDeviceGetAttribute(&value, which, device), "cuDeviceGetAttribute");
    return value;
  };
  char name[256] = {};
  check(driver().cuDeviceGetName(name, sizeof(name), device), "cuDeviceGetName");
  return {ordinal, name, attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
          attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
          attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)};
}

bool can_access(int ordinal, int peer) {
  CUdevice device = 0;
  CUdevice other = 0;
  int can = 0;
  check(driver().cuDeviceGet(&device, ordinal), "cuDeviceGet");
  check(driver().cuDeviceGet(&other, peer), "cuDeviceGet");
  check(driver().cuDeviceCanAccessPeer(&can, device, other), "cuDeviceCanAccessPeer");
  return can != 0;
}

}  // namespace pycollective::cuda
