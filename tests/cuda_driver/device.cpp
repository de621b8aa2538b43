// Devices, errors' names, and the way from a function's name and version to the function.
#include <cstdio>
#include <cstring>

#include "context.h"
#include "injection.h"
#include "settings.h"

using namespace standin;

CUresult cuDriverGetVersion(int* version) {
  if (!version) return CUDA_ERROR_INVALID_VALUE;
  *version = settings().version;
  return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char** name) {
  if (!name) return CUDA_ERROR_INVALID_VALUE;
  *name = nullptr;
  switch (error) {
#define STANDIN_NAME(code, value, text) \
  case code:                            \
    *name = #code;                      \
    break;
    STANDIN_ERRORS(STANDIN_NAME)
#undef STANDIN_NAME
  }
  return *name ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGetErrorString(CUresult error, const char** text) {
  if (!text) return CUDA_ERROR_INVALID_VALUE;
  *text = nullptr;
  switch (error) {
#define STANDIN_TEXT(code, value, words) \
  case code:                             \
    *text = words;                       \
    break;
    STANDIN_ERRORS(STANDIN_TEXT)
#undef STANDIN_TEXT
  }
  return *text ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuDeviceGetCount(int* count) {
  if (const CUresult error = initialised()) return error;
  if (!count) return CUDA_ERROR_INVALID_VALUE;
  *count = static_cast<int>(settings().devices.size());
  return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  if (const CUresult error = initialised()) return error;
  if (!device) return CUDA_ERROR_INVALID_VALUE;
  if (!valid_device(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char* name, int length, CUdevice device) {
  if (const CUresult error = initialised()) return error;
  if (!name || length <= 0) return CUDA_ERROR_INVALID_VALUE;
  if (!valid_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  std::snprintf(name, static_cast<std::size_t>(length), "stand-in for a GPU");
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice device) {
  if (const CUresult error = initialised()) return error;
  if (!uuid) return CUDA_ERROR_INVALID_VALUE;
  if (!valid_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  // The device's own: the same in every process, whatever its ordinal there.
  std::memcpy(uuid->bytes, "stand-in device", sizeof uuid->bytes);
  uuid->bytes[15] = static_cast<char>(settings().devices[static_cast<std::size_t>(device)]);
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  if (const CUresult error = initialised()) return error;
  if (!value) return CUDA_ERROR_INVALID_VALUE;
  if (!valid_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  switch (attribute) {
#define STANDIN_VALUE(name, number, answer) \
  case name:                                \
    *value = answer;                        \
    return CUDA_SUCCESS;
    STANDIN_DEVICE_ATTRIBUTES(STANDIN_VALUE)
#undef STANDIN_VALUE
  }
  return CUDA_ERROR_INVALID_VALUE;
}

CUresult cuDeviceCanAccessPeer(int* can, CUdevice device, CUdevice peer) {
  if (const CUresult error = initialised()) return error;
  if (!can) return CUDA_ERROR_INVALID_VALUE;
  if (!valid_device(device) || !valid_device(peer)) return CUDA_ERROR_INVALID_DEVICE;
  *can = settings().peers && device != peer;
  return CUDA_SUCCESS;
}

CUresult cuGetProcAddress_v2(const char* name, void** function, int version, cuuint64_t flags,
                             CUdriverProcAddressQueryResult* status) {
  if (!name || !function || version > settings().version) return CUDA_ERROR_INVALID_VALUE;
  if (flags > CU_GET_PROC_ADDRESS_LEGACY_STREAM) return CUDA_ERROR_NOT_SUPPORTED;
  struct Row {
    const char* name;
    int since;
    void* function;
  };
  static const Row rows[] = {
#define STANDIN_ROW(base, since, exported) \
  {#base, since, reinterpret_cast<void*>(&Called<&exported, kRow_##base>::call)},
      STANDIN_FUNCTIONS(STANDIN_ROW) STANDIN_OLDER_FUNCTIONS(STANDIN_ROW)
#undef STANDIN_ROW
  };
  *function = nullptr;
  CUdriverProcAddressQueryResult found = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  for (const Row& row : rows) {
    if (std::strcmp(row.name, name) != 0 || row.since > settings().version) continue;
    // Older signatures of the same name are not played.
    found = CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT;
    if (row.since > version) continue;
    *function = row.function;
    found = CU_GET_PROC_ADDRESS_SUCCESS;
    break;
  }
  if (status) *status = found;
  return CUDA_SUCCESS;  // as cuda.h says, also where *function is null
}
