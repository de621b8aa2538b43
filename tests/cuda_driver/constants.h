// The driver's numbers that the stand-in knows. test_signatures.cpp compares them with <cuda.h>.
#pragma once

#define STANDIN_ERRORS(X)                                                                          \
  X(CUDA_SUCCESS, 0, "no error")                                                                   \
  X(CUDA_ERROR_INVALID_VALUE, 1, "invalid argument")                                               \
  X(CUDA_ERROR_OUT_OF_MEMORY, 2, "out of memory")                                                  \
  X(CUDA_ERROR_NOT_INITIALIZED, 3, "initialization error")                                         \
  X(CUDA_ERROR_NO_DEVICE, 100, "no CUDA-capable device is detected")                               \
  X(CUDA_ERROR_INVALID_DEVICE, 101, "invalid device ordinal")                                      \
  X(CUDA_ERROR_INVALID_IMAGE, 200, "device kernel image is invalid")                               \
  X(CUDA_ERROR_INVALID_CONTEXT, 201, "invalid device context")                                     \
  X(CUDA_ERROR_MAP_FAILED, 205, "mapping of buffer object failed")                                 \
  X(CUDA_ERROR_PEER_ACCESS_UNSUPPORTED, 217, "peer access is not supported between these devices") \
  X(CUDA_ERROR_INVALID_HANDLE, 400, "invalid resource handle")                                     \
  X(CUDA_ERROR_NOT_FOUND, 500, "named symbol not found")                                           \
  X(CUDA_ERROR_NOT_READY, 600, "device not ready")                                                 \
  X(CUDA_ERROR_ILLEGAL_ADDRESS, 700, "an illegal memory access was encountered")                   \
  X(CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, 701, "too many resources requested for launch")            \
  X(CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, 704, "peer access is already enabled")                 \
  X(CUDA_ERROR_LAUNCH_FAILED, 719, "unspecified launch failure")                                   \
  X(CUDA_ERROR_NOT_SUPPORTED, 801, "operation not supported")                                      \
  X(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, 900,                                                    \
    "operation not permitted when stream is capturing")                                            \
  X(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, 901,                                                    \
    "operation failed due to a previous error during capture")                                     \
  X(CUDA_ERROR_STREAM_CAPTURE_MERGE, 902, "operation would result in a merge of two captures")     \
  X(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, 903, "capture was not ended in the stream it began in")   \
  X(CUDA_ERROR_STREAM_CAPTURE_UNJOINED, 904, "capturing stream has unjoined work")                 \
  X(CUDA_ERROR_STREAM_CAPTURE_ISOLATION, 905, "dependency created on uncaptured work")             \
  X(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, 906,                                                       \
    "operation would make the legacy stream depend on a capturing blocking stream")                \
  X(CUDA_ERROR_CAPTURED_EVENT, 907, "event was last recorded in a capturing stream")               \
  X(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, 908,                                                   \
    "attempt to terminate a thread-local capture sequence from another thread")                    \
  X(CUDA_ERROR_UNKNOWN, 999, "unknown error")

// The third column: what each device of the stand-in answers, where that is one number (some are
// settings.h's).
#define STANDIN_DEVICE_ATTRIBUTES(X)                                          \
  X(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, 1, 64)                         \
  X(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 16, settings().multiprocessors) \
  X(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 75, 9)                      \
  X(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 76, 0)

#define STANDIN_FUNCTION_ATTRIBUTES(X) X(CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, 0)

#define STANDIN_POINTER_ATTRIBUTES(X)    \
  X(CU_POINTER_ATTRIBUTE_MEMORY_TYPE, 2) \
  X(CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, 9)

#define STANDIN_FLAGS(X)                   \
  X(CU_STREAM_DEFAULT, 0)                  \
  X(CU_STREAM_NON_BLOCKING, 1)             \
  X(CU_EVENT_DISABLE_TIMING, 2)            \
  X(CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, 1) \
  X(CU_MEMORYTYPE_HOST, 1)                 \
  X(CU_MEMORYTYPE_DEVICE, 2)               \
  X(CU_GET_PROC_ADDRESS_LEGACY_STREAM, 1)

#define STANDIN_QUERY_RESULTS(X)             \
  X(CU_GET_PROC_ADDRESS_SUCCESS, 0)          \
  X(CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND, 1) \
  X(CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT, 2)

#define STANDIN_CAPTURE_STATUS(X)       \
  X(CU_STREAM_CAPTURE_STATUS_NONE, 0)   \
  X(CU_STREAM_CAPTURE_STATUS_ACTIVE, 1) \
  X(CU_STREAM_CAPTURE_STATUS_INVALIDATED, 2)

#define STANDIN_CAPTURE_MODES(X)            \
  X(CU_STREAM_CAPTURE_MODE_GLOBAL, 0)       \
  X(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, 1) \
  X(CU_STREAM_CAPTURE_MODE_RELAXED, 2)
