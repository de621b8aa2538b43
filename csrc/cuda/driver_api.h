// The few of the CUDA driver's types, numbers and functions that are used, under its own names: no
// CUDA header is needed to build. csrc/tests/test_cuda_signatures.cpp holds them to <cuda.h>.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pycollective::cuda {

// X(its type, name, value)
#define PYCOLLECTIVE_CUDA_NUMBERS(X)                                         \
  X(CUresult, CUDA_SUCCESS, 0)                                               \
  X(CUresult, CUDA_ERROR_OUT_OF_MEMORY, 2)                                   \
  X(CUresult, CUDA_ERROR_NOT_INITIALIZED, 3)                                 \
  X(CUresult, CUDA_ERROR_NO_DEVICE, 100)                                     \
  X(CUresult, CUDA_ERROR_INVALID_IMAGE, 200)                                 \
  X(CUresult, CUDA_ERROR_INVALID_CONTEXT, 201)                               \
  X(CUresult, CUDA_ERROR_NO_BINARY_FOR_GPU, 209)                             \
  X(CUresult, CUDA_ERROR_INVALID_PTX, 218)                                   \
  X(CUresult, CUDA_ERROR_JIT_COMPILER_NOT_FOUND, 221)                        \
  X(CUresult, CUDA_ERROR_UNSUPPORTED_PTX_VERSION, 222)                       \
  X(CUresult, CUDA_ERROR_JIT_COMPILATION_DISABLED, 223)                      \
  X(CUresult, CUDA_ERROR_NOT_READY, 600)                                     \
  X(CUresult, CUDA_ERROR_ILLEGAL_ADDRESS, 700)                               \
  X(CUresult, CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, 704)                   \
  X(CUresult, CUDA_ERROR_LAUNCH_FAILED, 719)                                 \
  X(CUresult, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, 906)                       \
  X(CUresult, CUDA_ERROR_UNKNOWN, 999)                                       \
  X(CUdevice_attribute, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, 1)        \
  X(CUdevice_attribute, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 16)        \
  X(CUdevice_attribute, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 75)    \
  X(CUdevice_attribute, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 76)    \
  X(CUpointer_attribute, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, 2)                \
  X(CUpointer_attribute, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, 9)             \
  X(CUfunction_attribute, CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, 0)        \
  X(CUstreamCaptureStatus, CU_STREAM_CAPTURE_STATUS_NONE, 0)                 \
  X(CUstreamCaptureStatus, CU_STREAM_CAPTURE_STATUS_ACTIVE, 1)               \
  X(CUstreamCaptureStatus, CU_STREAM_CAPTURE_STATUS_INVALIDATED, 2)          \
  X(CUstreamCaptureMode, CU_STREAM_CAPTURE_MODE_GLOBAL, 0)                   \
  X(CUstreamCaptureMode, CU_STREAM_CAPTURE_MODE_RELAXED, 2)                  \
  X(CUdriverProcAddressQueryResult, CU_GET_PROC_ADDRESS_SUCCESS, 0)          \
  X(CUdriverProcAddressQueryResult, CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND, 1) \
  X(unsigned, CU_STREAM_NON_BLOCKING, 1)                                     \
  X(unsigned, CU_EVENT_DISABLE_TIMING, 2)                                    \
  X(unsigned, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, 1)                         \
  X(unsigned, CU_MEMHOSTALLOC_PORTABLE, 1)                                   \
  X(unsigned, CU_MEMHOSTALLOC_DEVICEMAP, 2)                                  \
  X(unsigned, CU_MEMORYTYPE_DEVICE, 2)                                       \
  X(unsigned, CU_GET_PROC_ADDRESS_LEGACY_STREAM, 1)

enum CUresult : int {};
enum CUdevice_attribute : int {};
enum CUpointer_attribute : int {};
enum CUfunction_attribute : int {};
enum CUstreamCaptureStatus : int {};
enum CUstreamCaptureMode : int {};
enum CUdriverProcAddressQueryResult : int {};
enum CUjit_option : int {};
#define PYCOLLECTIVE_CUDA_NUMBER(type, name, value) constexpr type name{value};
PYCOLLECTIVE_CUDA_NUMBERS(PYCOLLECTIVE_CUDA_NUMBER)
#undef PYCOLLECTIVE_CUDA_NUMBER

using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUcontext = struct CUctx_st*;
using CUmodule = struct CUmod_st*;
using CUfunction = struct CUfunc_st*;
using CUstream = struct CUstream_st*;  // null: the legacy stream
using CUevent = struct CUevent_st*;
using CUgraph = struct CUgraph_st*;
using CUgraphNode = struct CUgraphNode_st*;

struct CUuuid {
  char bytes[16];
};
struct CUipcMemHandle {
  char reserved[64];
};

// The one function that is found by its symbol: in drivers of CUDA 12 and later.
using GetProcAddress = CUresult (*)(const char* name, void** function, int version,
                                    std::uint64_t flags, CUdriverProcAddressQueryResult* result);
constexpr const char* kGetProcAddress = "cuGetProcAddress_v2";

// X(name, the version of CUDA in which this signature came, parameters): what is fetched from the
// driver. A call on a stream is the one of the legacy stream, whatever the program's default is.
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

}  // namespace pycollective::cuda
