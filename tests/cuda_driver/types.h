// The driver's types, written down anew: the stand-in builds where no <cuda.h> is.
#pragma once

#include "constants.h"

#if !defined(CUDA_VERSION)  // test_signatures.cpp includes <cuda.h> first

#define STANDIN_ENUMERATOR(name, value, ...) name = (value),
enum CUresult_ : int { STANDIN_ERRORS(STANDIN_ENUMERATOR) };
using CUresult = CUresult_;
enum CUdevice_attribute : int { STANDIN_DEVICE_ATTRIBUTES(STANDIN_ENUMERATOR) };
enum CUfunction_attribute : int { STANDIN_FUNCTION_ATTRIBUTES(STANDIN_ENUMERATOR) };
enum CUpointer_attribute : int { STANDIN_POINTER_ATTRIBUTES(STANDIN_ENUMERATOR) };
enum CUdriverProcAddressQueryResult : int { STANDIN_QUERY_RESULTS(STANDIN_ENUMERATOR) };
enum CUstreamCaptureStatus : int { STANDIN_CAPTURE_STATUS(STANDIN_ENUMERATOR) };
enum CUstreamCaptureMode : int { STANDIN_CAPTURE_MODES(STANDIN_ENUMERATOR) };
enum : unsigned { STANDIN_FLAGS(STANDIN_ENUMERATOR) };
#undef STANDIN_ENUMERATOR
enum CUjit_option : int {};

using CUdevice = int;
using CUdeviceptr = unsigned long long;
using cuuint64_t = unsigned long;  // std::uint64_t, as in <cuda.h>
using CUcontext = struct CUctx_st*;
using CUmodule = struct CUmod_st*;
using CUfunction = struct CUfunc_st*;
using CUstream = struct CUstream_st*;
using CUevent = struct CUevent_st*;
using CUgraph = struct CUgraph_st*;
using CUgraphExec = struct CUgraphExec_st*;
using CUgraphNode = struct CUgraphNode_st*;

struct CUuuid {
  char bytes[16];
};
struct CUipcMemHandle {
  char reserved[64];
};

#endif
