// The few of the CUDA driver's types, numbers and functions that are used, under its own names: no
// CUDA header is needed to build. csrc/tests/test_cuda_signatures.cpp holds them to <cuda.h>.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pycollective::cuda {

#define PYCOLLECTIVE_CUDA_ERRORS(X)                 \
  X(CUDA_SUCCESS, 0)                                \
  X(CUDA_ERROR_INVALID_VALUE, 1)                    \
  X(CUDA_ERROR_OUT_OF_MEMORY, 2)                    \
  X(CUDA_ERROR_NOT_INITIALIZED, 3)                  \
  X(CUDA_ERROR_DEINITIALIZED, 4)                    \
  X(CUDA_ERROR_NO_DEVICE, 100)                      \
  X(CUDA_ERROR_INVALID_DEVICE, 101)                 \
  X(CUDA_ERROR_INVALID_IMAGE, 200)                  \
  X(CUDA_ERROR_INVALID_CONTEXT, 201)                \
  X(CUDA_ERROR_NO_BINARY_FOR_GPU, 209)              \
  X(CUDA_ERROR_PEER_ACCESS_UNSUPPORTED, 217)        \
  X(CUDA_ERROR_INVALID_PTX, 218)                    \
  X(CUDA_ERROR_JIT_COMPILER_NOT_FOUND, 221)         \
  X(CUDA_ERROR_UNSUPPORTED_PTX_VERSION, 222)        \
  X(CUDA_ERROR_JIT_COMPILATION_DISABLED, 223)       \
  X(CUDA_ERROR_INVALID_HANDLE, 400)                 \
  X(CUDA_ERROR_NOT_FOUND, 500)                      \
  X(CUDA_ERROR_NOT_READY, 600)                      \
  X(CUDA_ERROR_ILLEGAL_ADDRESS, 700)                \
  X(CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, 701)        \
  X(CUDA_ERROR_LAUNCH_TIMEOUT, 702)                 \
  X(CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, 704)    \
  X(CUDA_ERROR_CONTEXT_IS_DESTROYED, 709)           \
  X(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, 712) \
  X(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, 713)     \
  X(CUDA_ERROR_LAUNCH_FAILED, 719)                  \
  X(CUDA_ERROR_NOT_SUPPORTED, 801)                  \
  X(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, 900)     \
  X(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, 901)     \
  X(CUDA_ERROR_STREAM_CAPTURE_ISOLATION, 905)       \
  X(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, 906)        \
  X(CUDA_ERROR_CAPTURED_EVENT, 907)                 \
  X(CUDA_ERROR_UNKNOWN, 999)

#define PYCOLLECTIVE_CUDA_DEVICE_ATTRIBUTES(X)        \
  X(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, 1)     \
  X(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 16)     \
  X(CU_DEVICE_ATTRIBUTE_COMPUTE_MODE, 20)             \
  X(CU_DEVICE_ATTRIBUTE_PCI_BUS_ID, 33)               \
  X(CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID, 34)            \
  X(CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID, 50)            \
  X(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 75) \
  X(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 76) \
  X(CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, 91)

#define PYCOLLECTIVE_CUDA_POINTER_ATTRIBUTES(X)          \
  X(CU_POINTER_ATTRIBUTE_CONTEXT, 1)                     \
  X(CU_POINTER_ATTRIBUTE_MEMORY_TYPE, 2)                 \
  X(CU_POINTER_ATTRIBUTE_DEVICE_POINTER, 3)              \
  X(CU_POINTER_ATTRIBUTE_HOST_POINTER, 4)                \
  X(CU_POINTER_ATTRIBUTE_BUFFER_ID, 7)                   \
  X(CU_POINTER_ATTRIBUTE_IS_MANAGED, 8)                  \
  X(CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, 9)              \
  X(CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, 10) \
  X(CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, 11)           \
  X(CU_POINTER_ATTRIBUTE_RANGE_SIZE, 12)

#define PYCOLLECTIVE_CUDA_FUNCTION_ATTRIBUTES(X) \
  X(CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, 0)  \
  X(CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, 1)      \
  X(CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, 3)       \
  X(CU_FUNC_ATTRIBUTE_NUM_REGS, 4)

#define PYCOLLECTIVE_CUDA_CAPTURE_STATUS(X) \
  X(CU_STREAM_CAPTURE_STATUS_NONE, 0)       \
  X(CU_STREAM_CAPTURE_STATUS_ACTIVE, 1)     \
  X(CU_STREAM_CAPTURE_STATUS_INVALIDATED, 2)

#define PYCOLLECTIVE_CUDA_CAPTURE_MODE(X)   \
  X(CU_STREAM_CAPTURE_MODE_GLOBAL, 0)       \
  X(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, 1) \
  X(CU_STREAM_CAPTURE_MODE_RELAXED, 2)

#define PYCOLLECTIVE_CUDA_QUERY_RESULTS(X)   \
  X(CU_GET_PROC_ADDRESS_SUCCESS, 0)          \
  X(CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND, 1) \
  X(CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT, 2)

#define PYCOLLECTIVE_CUDA_FLAGS(X)         \
  X(CU_STREAM_NON_BLOCKING, 1)             \
  X(CU_EVENT_BLOCKING_SYNC, 1)             \
  X(CU_EVENT_DISABLE_TIMING, 2)            \
  X(CU_EVENT_INTERPROCESS, 4)              \
  X(CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, 1) \
  X(CU_MEMHOSTALLOC_PORTABLE, 1)           \
  X(CU_MEMHOSTALLOC_DEVICEMAP, 2)          \
  X(CU_MEMHOSTREGISTER_PORTABLE, 1)        \
  X(CU_MEMHOSTREGISTER_DEVICEMAP, 2)       \
  X(CU_MEMORYTYPE_HOST, 1)                 \
  X(CU_MEMORYTYPE_DEVICE, 2)               \
  X(CU_COMPUTEMODE_PROHIBITED, 2)          \
  X(CU_COMPUTEMODE_EXCLUSIVE_PROCESS, 3)   \
  X(CU_GET_PROC_ADDRESS_LEGACY_STREAM, 1)

// All of the above, for the test.
#define PYCOLLECTIVE_CUDA_NUMBERS(X)       \
  PYCOLLECTIVE_CUDA_ERRORS(X)              \
  PYCOLLECTIVE_CUDA_DEVICE_ATTRIBUTES(X)   \
  PYCOLLECTIVE_CUDA_POINTER_ATTRIBUTES(X)  \
  PYCOLLECTIVE_CUDA_FUNCTION_ATTRIBUTES(X) \
  PYCOLLECTIVE_CUDA_CAPTURE_STATUS(X)      \
  PYCOLLECTIVE_CUDA_CAPTURE_MODE(X)        \
  PYCOLLECTIVE_CUDA_QUERY_RESULTS(X)       \
  PYCOLLECTIVE_CUDA_FLAGS(X)

#define PYCOLLECTIVE_CUDA_ENUMERATOR(name, value) name = (value),
enum CUresult : int { PYCOLLECTIVE_CUDA_ERRORS(PYCOLLECTIVE_CUDA_ENUMERATOR) };
enum CUdevice_attribute : int { PYCOLLECTIVE_CUDA_DEVICE_ATTRIBUTES(PYCOLLECTIVE_CUDA_ENUMERATOR) };
enum CUpointer_attribute : int {
  PYCOLLECTIVE_CUDA_POINTER_ATTRIBUTES(PYCOLLECTIVE_CUDA_ENUMERATOR)
};
enum CUfunction_attribute : int {
  PYCOLLECTIVE_CUDA_FUNCTION_ATTRIBUTES(PYCOLLECTIVE_CUDA_ENUMERATOR)
};
enum CUstreamCaptureStatus : int { PYCOLLECTIVE_CUDA_CAPTURE_STATUS(PYCOLLECTIVE_CUDA_ENUMERATOR) };
enum CUstreamCaptureMode : int { PYCOLLECTIVE_CUDA_CAPTURE_MODE(PYCOLLECTIVE_CUDA_ENUMERATOR) };
enum CUdriverProcAddressQueryResult : int {
  PYCOLLECTIVE_CUDA_QUERY_RESULTS(PYCOLLECTIVE_CUDA_ENUMERATOR)
};
enum CUjit_option : int {};  // none is used
enum : unsigned { PYCOLLECTIVE_CUDA_FLAGS(PYCOLLECTIVE_CUDA_ENUMERATOR) };
#undef PYCOLLECTIVE_CUDA_ENUMERATOR

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

}  // namespace pycollective::cuda
