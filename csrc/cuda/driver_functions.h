// X(name, the version of CUDA in which this signature came, parameters): what is fetched from the
// driver. A call on a stream is the one of the legacy stream, whatever the program's default is.
#pragma once

#include "cuda/driver_api.h"

// clang-format off: a table
#define PYCOLLECTIVE_CUDA_FUNCTIONS(X)                                                          \
  X(cuInit, 2000, (unsigned))                                                                   \
  X(cuDriverGetVersion, 2020, (int*))                                                           \
  X(cuGetErrorName, 6000, (CUresult, const char**))                                             \
  X(cuGetErrorString, 6000, (CUresult, const char**))                                           \
  X(cuDeviceGetCount, 2000, (int*))                                                             \
  X(cuDeviceGet, 2000, (CUdevice*, int))                                                        \
  X(cuDeviceGetName, 2000, (char*, int, CUdevice))                                              \
  X(cuDeviceGetUuid, 11040, (CUuuid*, CUdevice))                                                \
  X(cuDeviceGetAttribute, 2000, (int*, CUdevice_attribute, CUdevice))                           \
  X(cuDeviceCanAccessPeer, 4000, (int*, CUdevice, CUdevice))                                    \
  X(cuDevicePrimaryCtxRetain, 7000, (CUcontext*, CUdevice))                                     \
  X(cuCtxGetCurrent, 4000, (CUcontext*))                                                        \
  X(cuCtxPushCurrent, 4000, (CUcontext))                                                        \
  X(cuCtxPopCurrent, 4000, (CUcontext*))                                                        \
  X(cuCtxEnablePeerAccess, 4000, (CUcontext, unsigned))                                         \
  X(cuPointerGetAttributes, 7000, (unsigned, CUpointer_attribute*, void**, CUdeviceptr))        \
  X(cuMemAlloc, 3020, (CUdeviceptr*, std::size_t))                                              \
  X(cuMemFree, 3020, (CUdeviceptr))                                                             \
  X(cuMemcpyAsync, 4000, (CUdeviceptr, CUdeviceptr, std::size_t, CUstream))                     \
  X(cuMemsetD32Async, 3020, (CUdeviceptr, unsigned, std::size_t, CUstream))                     \
  X(cuMemHostAlloc, 2020, (void**, std::size_t, unsigned))                                      \
  X(cuMemFreeHost, 2000, (void*))                                                               \
  X(cuMemHostGetDevicePointer, 3020, (CUdeviceptr*, void*, unsigned))                           \
  X(cuIpcGetMemHandle, 4010, (CUipcMemHandle*, CUdeviceptr))                                    \
  X(cuIpcOpenMemHandle, 11000, (CUdeviceptr*, CUipcMemHandle, unsigned))                        \
  X(cuIpcCloseMemHandle, 4010, (CUdeviceptr))                                                   \
  X(cuEventCreate, 2000, (CUevent*, unsigned))                                                  \
  X(cuEventDestroy, 4000, (CUevent))                                                            \
  X(cuEventRecord, 2000, (CUevent, CUstream))                                                   \
  X(cuEventQuery, 2000, (CUevent))                                                              \
  X(cuStreamCreate, 2000, (CUstream*, unsigned))                                                \
  X(cuStreamDestroy, 4000, (CUstream))                                                          \
  X(cuStreamGetFlags, 5050, (CUstream, unsigned*))                                              \
  X(cuStreamQuery, 2000, (CUstream))                                                            \
  X(cuStreamSynchronize, 2000, (CUstream))                                                      \
  X(cuStreamWaitEvent, 3020, (CUstream, CUevent, unsigned))                                     \
  X(cuStreamIsCapturing, 10000, (CUstream, CUstreamCaptureStatus*))                             \
  X(cuStreamGetCaptureInfo, 11030, (CUstream, CUstreamCaptureStatus*, std::uint64_t*, CUgraph*,  \
                                    const CUgraphNode**, std::size_t*))                         \
  X(cuThreadExchangeStreamCaptureMode, 10010, (CUstreamCaptureMode*))                           \
  X(cuModuleLoadDataEx, 2010, (CUmodule*, const void*, unsigned, CUjit_option*, void**))        \
  X(cuModuleUnload, 2000, (CUmodule))                                                           \
  X(cuModuleGetFunction, 2000, (CUfunction*, CUmodule, const char*))                            \
  X(cuFuncGetAttribute, 2020, (int*, CUfunction_attribute, CUfunction))                         \
  X(cuOccupancyMaxActiveBlocksPerMultiprocessor, 6050, (int*, CUfunction, int, std::size_t))    \
  X(cuLaunchKernel, 4000, (CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned,        \
                           unsigned, unsigned, CUstream, void**, void**))
// clang-format on
