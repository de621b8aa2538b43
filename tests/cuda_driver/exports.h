// What the library exports: the driver's names, as <cuda.h> 13 makes them, and the versions in
// which each came to be (cudaTypedefs.h), by which cuGetProcAddress finds them.
#pragma once

#include <cstddef>

#include "types.h"

#pragma GCC visibility push(default)
extern "C" {
CUresult cuGetProcAddress_v2(const char*, void**, int, cuuint64_t, CUdriverProcAddressQueryResult*);
CUresult cuInit(unsigned);
CUresult cuDriverGetVersion(int*);
CUresult cuGetErrorName(CUresult, const char**);
CUresult cuGetErrorString(CUresult, const char**);

CUresult cuDeviceGetCount(int*);
CUresult cuDeviceGet(CUdevice*, int);
CUresult cuDeviceGetName(char*, int, CUdevice);
CUresult cuDeviceGetUuid_v2(CUuuid*, CUdevice);
CUresult cuDeviceGetAttribute(int*, CUdevice_attribute, CUdevice);
CUresult cuDeviceCanAccessPeer(int*, CUdevice, CUdevice);
CUresult cuDevicePrimaryCtxRetain(CUcontext*, CUdevice);
CUresult cuCtxGetCurrent(CUcontext*);
CUresult cuCtxPushCurrent_v2(CUcontext);
CUresult cuCtxPopCurrent_v2(CUcontext*);
CUresult cuCtxEnablePeerAccess(CUcontext, unsigned);

CUresult cuPointerGetAttributes(unsigned, CUpointer_attribute*, void**, CUdeviceptr);
CUresult cuMemAlloc_v2(CUdeviceptr*, size_t);
CUresult cuMemFree_v2(CUdeviceptr);
CUresult cuMemGetInfo_v2(size_t*, size_t*);
CUresult cuMemcpyAsync(CUdeviceptr, CUdeviceptr, size_t, CUstream);
CUresult cuMemsetD32Async(CUdeviceptr, unsigned, size_t, CUstream);
CUresult cuMemHostAlloc(void**, size_t, unsigned);
CUresult cuMemFreeHost(void*);
CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr*, void*, unsigned);

CUresult cuIpcGetMemHandle(CUipcMemHandle*, CUdeviceptr);
CUresult cuIpcOpenMemHandle_v2(CUdeviceptr*, CUipcMemHandle, unsigned);
CUresult cuIpcCloseMemHandle(CUdeviceptr);

CUresult cuEventCreate(CUevent*, unsigned);
CUresult cuEventDestroy_v2(CUevent);
CUresult cuEventRecord(CUevent, CUstream);
CUresult cuEventQuery(CUevent);
CUresult cuEventElapsedTime_v2(float*, CUevent, CUevent);

CUresult cuStreamCreate(CUstream*, unsigned);
CUresult cuStreamDestroy_v2(CUstream);
CUresult cuStreamGetFlags(CUstream, unsigned*);
CUresult cuStreamQuery(CUstream);
CUresult cuStreamSynchronize(CUstream);
CUresult cuStreamWaitEvent(CUstream, CUevent, unsigned);

CUresult cuStreamIsCapturing(CUstream, CUstreamCaptureStatus*);
CUresult cuStreamGetCaptureInfo_v2(CUstream, CUstreamCaptureStatus*, cuuint64_t*, CUgraph*,
                                   const CUgraphNode**, size_t*);
CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode*);
CUresult cuStreamBeginCapture_v2(CUstream, CUstreamCaptureMode);
CUresult cuStreamEndCapture(CUstream, CUgraph*);
CUresult cuGraphInstantiateWithFlags(CUgraphExec*, CUgraph, unsigned long long);
CUresult cuGraphLaunch(CUgraphExec, CUstream);
CUresult cuGraphExecDestroy(CUgraphExec);
CUresult cuGraphDestroy(CUgraph);

CUresult cuModuleLoadDataEx(CUmodule*, const void*, unsigned, CUjit_option*, void**);
CUresult cuModuleUnload(CUmodule);
CUresult cuModuleGetFunction(CUfunction*, CUmodule, const char*);
CUresult cuFuncGetAttribute(int*, CUfunction_attribute, CUfunction);
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int*, CUfunction, int, size_t);
CUresult cuLaunchKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                        unsigned, CUstream, void**, void**);
}
#pragma GCC visibility pop

// X(base name, version in which this signature came, exported name)
#define STANDIN_FUNCTIONS(X)                                                     \
  X(cuGetProcAddress, 12000, cuGetProcAddress_v2)                                \
  X(cuInit, 2000, cuInit)                                                        \
  X(cuDriverGetVersion, 2020, cuDriverGetVersion)                                \
  X(cuGetErrorName, 6000, cuGetErrorName)                                        \
  X(cuGetErrorString, 6000, cuGetErrorString)                                    \
  X(cuDeviceGetCount, 2000, cuDeviceGetCount)                                    \
  X(cuDeviceGet, 2000, cuDeviceGet)                                              \
  X(cuDeviceGetName, 2000, cuDeviceGetName)                                      \
  X(cuDeviceGetUuid, 11040, cuDeviceGetUuid_v2)                                  \
  X(cuDeviceGetAttribute, 2000, cuDeviceGetAttribute)                            \
  X(cuDeviceCanAccessPeer, 4000, cuDeviceCanAccessPeer)                          \
  X(cuDevicePrimaryCtxRetain, 7000, cuDevicePrimaryCtxRetain)                    \
  X(cuCtxGetCurrent, 4000, cuCtxGetCurrent)                                      \
  X(cuCtxPushCurrent, 4000, cuCtxPushCurrent_v2)                                 \
  X(cuCtxPopCurrent, 4000, cuCtxPopCurrent_v2)                                   \
  X(cuCtxEnablePeerAccess, 4000, cuCtxEnablePeerAccess)                          \
  X(cuPointerGetAttributes, 7000, cuPointerGetAttributes)                        \
  X(cuMemAlloc, 3020, cuMemAlloc_v2)                                             \
  X(cuMemFree, 3020, cuMemFree_v2)                                               \
  X(cuMemGetInfo, 3020, cuMemGetInfo_v2)                                         \
  X(cuMemcpyAsync, 4000, cuMemcpyAsync)                                          \
  X(cuMemsetD32Async, 3020, cuMemsetD32Async)                                    \
  X(cuMemHostAlloc, 2020, cuMemHostAlloc)                                        \
  X(cuMemFreeHost, 2000, cuMemFreeHost)                                          \
  X(cuMemHostGetDevicePointer, 3020, cuMemHostGetDevicePointer_v2)               \
  X(cuIpcGetMemHandle, 4010, cuIpcGetMemHandle)                                  \
  X(cuIpcOpenMemHandle, 11000, cuIpcOpenMemHandle_v2)                            \
  X(cuIpcCloseMemHandle, 4010, cuIpcCloseMemHandle)                              \
  X(cuEventCreate, 2000, cuEventCreate)                                          \
  X(cuEventDestroy, 4000, cuEventDestroy_v2)                                     \
  X(cuEventRecord, 2000, cuEventRecord)                                          \
  X(cuEventQuery, 2000, cuEventQuery)                                            \
  X(cuEventElapsedTime, 2000, cuEventElapsedTime_v2)                             \
  X(cuStreamCreate, 2000, cuStreamCreate)                                        \
  X(cuStreamDestroy, 4000, cuStreamDestroy_v2)                                   \
  X(cuStreamGetFlags, 5050, cuStreamGetFlags)                                    \
  X(cuStreamQuery, 2000, cuStreamQuery)                                          \
  X(cuStreamSynchronize, 2000, cuStreamSynchronize)                              \
  X(cuStreamWaitEvent, 3020, cuStreamWaitEvent)                                  \
  X(cuStreamIsCapturing, 10000, cuStreamIsCapturing)                             \
  X(cuThreadExchangeStreamCaptureMode, 10010, cuThreadExchangeStreamCaptureMode) \
  X(cuStreamBeginCapture, 10010, cuStreamBeginCapture_v2)                        \
  X(cuStreamEndCapture, 10000, cuStreamEndCapture)                               \
  X(cuGraphInstantiateWithFlags, 11040, cuGraphInstantiateWithFlags)             \
  X(cuGraphLaunch, 10000, cuGraphLaunch)                                         \
  X(cuGraphExecDestroy, 10000, cuGraphExecDestroy)                               \
  X(cuGraphDestroy, 10000, cuGraphDestroy)                                       \
  X(cuModuleLoadDataEx, 2010, cuModuleLoadDataEx)                                \
  X(cuModuleUnload, 2000, cuModuleUnload)                                        \
  X(cuModuleGetFunction, 2000, cuModuleGetFunction)                              \
  X(cuFuncGetAttribute, 2020, cuFuncGetAttribute)                                \
  X(cuOccupancyMaxActiveBlocksPerMultiprocessor, 6050,                           \
    cuOccupancyMaxActiveBlocksPerMultiprocessor)                                 \
  X(cuLaunchKernel, 4000, cuLaunchKernel)

// The same, of which <cuda.h> 13 takes a later one.
#define STANDIN_OLDER_FUNCTIONS(X) X(cuStreamGetCaptureInfo, 11030, cuStreamGetCaptureInfo_v2)
