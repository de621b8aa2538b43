// Initialisation, contexts and whose things are whose; versions; devices.
#include "test_session.h"

using namespace standin::testing;

TEST(nothing_before_initialisation) {
  int count = 0;
  CUcontext context = nullptr;
  CUdeviceptr address = 0;
  EXPECT(CUDA_ERROR_NOT_INITIALIZED, cu().cuDeviceGetCount(&count));
  EXPECT(CUDA_ERROR_NOT_INITIALIZED, cu().cuDevicePrimaryCtxRetain(&context, 0));
  EXPECT(CUDA_ERROR_NOT_INITIALIZED, cu().cuMemAlloc(&address, 4));
  EXPECT(CUDA_ERROR_INVALID_VALUE, cu().cuInit(1));
  OK(cu().cuInit(0));
  OK(cu().cuDeviceGetCount(&count));
  CHECK(count == 2);
}

TEST(a_call_without_a_context_is_an_error) {
  const Session session;
  const CUstream stream = new_stream();
  const CUdeviceptr address = device_words(4);
  const CUevent event = new_event();
  // Of another thread: what is current is each thread's own.
  std::thread([&] {
    CUcontext current = session.context;
    CUdeviceptr other = 0;
    CUstream another = nullptr;
    CUevent moment = nullptr;
    void* host = nullptr;
    OK(cu().cuCtxGetCurrent(&current));
    CHECK(!current);
    EXPECT(CUDA_ERROR_INVALID_CONTEXT, cu().cuMemAlloc(&other, 4));
    EXPECT(CUDA_ERROR_INVALID_CONTEXT, cu().cuMemFree(address));
    EXPECT(CUDA_ERROR_INVALID_CONTEXT, cu().cuMemHostAlloc(&host, 4, 0));
    EXPECT(CUDA_ERROR_INVALID_CONTEXT, cu().cuMemsetD32Async(address, 0, 1, stream));
    EXPECT(CUDA_ERROR_INVALID_CONTEXT, cu().cuStreamCreate(&another, 0));
    EXPECT(CUDA_ERROR_INVALID_CONTEXT, cu().cuStreamSynchronize(stream));
    EXPECT(CUDA_ERROR_INVALID_CONTEXT, cu().cuEventCreate(&moment, 0));
    EXPECT(CUDA_ERROR_INVALID_CONTEXT, cu().cuEventRecord(event, stream));
    EXPECT(CUDA_ERROR_INVALID_CONTEXT, cu().cuStreamWaitEvent(stream, event, 0));
    EXPECT(CUDA_ERROR_INVALID_CONTEXT, cu().cuEventQuery(event));
    EXPECT(CUDA_ERROR_INVALID_CONTEXT, cu().cuCtxPopCurrent(&current));
    OK(cu().cuCtxPushCurrent(session.context));
    OK(cu().cuEventQuery(event));
    OK(cu().cuCtxPopCurrent(&current));
    CHECK(current == session.context);
    EXPECT(CUDA_ERROR_INVALID_CONTEXT, cu().cuEventQuery(event));
  }).join();
}

TEST(things_of_another_context_are_refused) {
  const Session first(0);
  const CUstream stream = new_stream();
  const CUevent event = new_event();
  const CUdeviceptr address = device_words(64);
  const CUfunction copy = first.function("test_copy");
  const Session second(1);
  const CUstream own = new_stream();
  CUfunction found = nullptr;
  EXPECT(CUDA_ERROR_INVALID_HANDLE, cu().cuStreamQuery(stream));
  EXPECT(CUDA_ERROR_INVALID_HANDLE, cu().cuStreamDestroy(stream));
  EXPECT(CUDA_ERROR_INVALID_HANDLE, cu().cuEventRecord(event, own));
  EXPECT(CUDA_ERROR_INVALID_HANDLE, cu().cuEventQuery(event));
  EXPECT(CUDA_ERROR_INVALID_HANDLE, cu().cuModuleGetFunction(&found, first.module, "test_copy"));
  EXPECT(CUDA_ERROR_INVALID_HANDLE, launch(copy, kernels::Copy{}, 1, 1, own));
  EXPECT(CUDA_ERROR_INVALID_CONTEXT, cu().cuMemFree(address));
  EXPECT(CUDA_ERROR_INVALID_CONTEXT, cu().cuMemsetD32Async(address, 0, 1, own));
  OK(cu().cuStreamWaitEvent(own, event, 0));  // the one that may be another context's
  EXPECT(CUDA_ERROR_INVALID_HANDLE, cu().cuStreamQuery(reinterpret_cast<CUstream>(4096)));
}

PART(kernel_reaches_without_access) {
  const Session first(0);
  const CUdeviceptr address = device_words(64);
  const Session second(1);
  const CUstream stream = new_stream();
  OK(launch(second.function("test_copy"), kernels::Copy{at(address), at(device_words(64)), 64}, 1,
            64, stream));
  EXPECT(CUDA_ERROR_ILLEGAL_ADDRESS, cu().cuStreamSynchronize(stream));
}
TEST(peers_need_access) {
  CHECK(run_part("kernel_reaches_without_access").find("no access") != std::string::npos);
  const Session first(0);
  const CUdeviceptr address = device_words(64);
  OK(cu().cuMemsetD32Async(address, 3, 64, nullptr));
  OK(cu().cuStreamSynchronize(nullptr));
  const Session second(1);
  const CUstream stream = new_stream();
  const CUdeviceptr to = device_words(64);
  int can = 0;
  OK(cu().cuDeviceCanAccessPeer(&can, 1, 0));
  CHECK(can == 1);
  EXPECT(CUDA_ERROR_INVALID_CONTEXT, cu().cuCtxEnablePeerAccess(second.context, 0));
  OK(cu().cuCtxEnablePeerAccess(first.context, 0));
  EXPECT(CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, cu().cuCtxEnablePeerAccess(first.context, 0));
  OK(launch(second.function("test_copy"), kernels::Copy{at(address), at(to), 64}, 1, 64, stream));
  CHECK(read(to, 64, stream)[63] == 3);
}

PART(devices_without_peers) {
  const Session first(0), second(1);
  int can = 1;
  OK(cu().cuDeviceCanAccessPeer(&can, 1, 0));
  CHECK(can == 0);
  EXPECT(CUDA_ERROR_PEER_ACCESS_UNSUPPORTED, cu().cuCtxEnablePeerAccess(first.context, 0));
}
TEST(devices_may_be_unable_to_map_each_other) {
  run_part("devices_without_peers", {{"PYCOLLECTIVE_STANDIN_PEERS", "0"}});
}

PART(five_of_eight_devices) {
  OK(cu().cuInit(0));
  int count = 0;
  OK(cu().cuDeviceGetCount(&count));
  CHECK(count == 2);
  CUuuid first, second;
  OK(cu().cuDeviceGetUuid(&first, 0));
  OK(cu().cuDeviceGetUuid(&second, 1));
  int bus = 0;
  OK(cu().cuDeviceGetAttribute(&bus, CU_DEVICE_ATTRIBUTE_PCI_BUS_ID, 0));
  CHECK(bus == 6);
  CHECK(std::memcmp(&first, &second, sizeof first) != 0);
}
PART(no_devices) { EXPECT(CUDA_ERROR_NO_DEVICE, cu().cuInit(0)); }
TEST(devices_are_those_of_the_environment) {
  run_part("five_of_eight_devices",
           {{"PYCOLLECTIVE_STANDIN_DEVICES", "8"}, {"CUDA_VISIBLE_DEVICES", "5,2,-1,3"}});
  run_part("no_devices", {{"PYCOLLECTIVE_STANDIN_DEVICES", "0"}});
}

TEST(a_released_context_is_gone) {
  const Session session;
  const CUdeviceptr address = device_words(4);
  const CUstream stream = new_stream();
  CUcontext again = nullptr;
  OK(cu().cuDevicePrimaryCtxRetain(&again, 0));
  CHECK(again == session.context);
  OK(cu().cuDevicePrimaryCtxRelease(0));
  OK(cu().cuStreamSynchronize(stream));
  OK(cu().cuDevicePrimaryCtxRelease(0));
  EXPECT(CUDA_ERROR_CONTEXT_IS_DESTROYED, cu().cuStreamSynchronize(stream));
  EXPECT(CUDA_ERROR_INVALID_CONTEXT, cu().cuDevicePrimaryCtxRelease(0));
  EXPECT(CUDA_ERROR_INVALID_CONTEXT, cu().cuCtxPushCurrent(session.context));
  const Session anew;
  CHECK(anew.context != session.context);
  EXPECT(CUDA_ERROR_INVALID_VALUE, cu().cuMemFree(address));
  EXPECT(CUDA_ERROR_INVALID_HANDLE, cu().cuStreamQuery(stream));
}

TEST(a_fork_has_no_driver) {
  const Session session;
  const pid_t pid = fork();
  if (pid == 0) {
    CUdeviceptr address;
    const bool none = cu().cuMemAlloc(&address, 4) == CUDA_ERROR_NOT_INITIALIZED &&
                      cu().cuInit(0) == CUDA_ERROR_NOT_INITIALIZED;
    _exit(none ? 0 : 1);
  }
  int status = 0;
  CHECK(waitpid(pid, &status, 0) == pid && ended_well(status));
  CHECK(device_words(4) != 0);
}

PART(an_older_driver) {
  int version = 0;
  OK(cu().cuDriverGetVersion(&version));
  CHECK(version == 12020);
  void* function = nullptr;
  CUdriverProcAddressQueryResult status;
  EXPECT(CUDA_ERROR_INVALID_VALUE, cu().cuGetProcAddress("cuInit", &function, 13000, 0, &status));
}
TEST(functions_are_found_by_name_and_version) {
  run_part("an_older_driver", {{"PYCOLLECTIVE_STANDIN_VERSION", "12020"}});
  void* function = nullptr;
  CUdriverProcAddressQueryResult status;
  OK(cu().cuGetProcAddress("cuMemAlloc", &function, 13000, 0, &status));
  CHECK(function == reinterpret_cast<void*>(cu().cuMemAlloc));
  OK(cu().cuGetProcAddress("cuMemAlloc", &function, 3010, 0, &status));
  CHECK(!function && status == CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT);
  OK(cu().cuGetProcAddress("cuMemAlloc_v2", &function, 13000, 0, &status));
  CHECK(!function && status == CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND);
  OK(cu().cuGetProcAddress("cuMemAllocManaged", &function, 13000, 0, nullptr));
  CHECK(!function);
  EXPECT(CUDA_ERROR_INVALID_VALUE, cu().cuGetProcAddress("cuInit", &function, 14000, 0, nullptr));
}

PART(the_second_call_fails) {
  const Session session;
  CUdeviceptr address = 0;
  OK(cu().cuMemAlloc(&address, 4));
  EXPECT(CUDA_ERROR_OUT_OF_MEMORY, cu().cuMemAlloc(&address, 4));
  OK(cu().cuMemAlloc(&address, 4));
}
PART(a_context_that_has_failed) {
  const Session session;
  CUdeviceptr address = 0;
  EXPECT(CUDA_ERROR_ILLEGAL_ADDRESS, cu().cuStreamQuery(nullptr));
  EXPECT(CUDA_ERROR_ILLEGAL_ADDRESS, cu().cuStreamQuery(nullptr));
  EXPECT(CUDA_ERROR_ILLEGAL_ADDRESS, cu().cuMemAlloc(&address, 4));
  EXPECT(CUDA_ERROR_ILLEGAL_ADDRESS, cu().cuCtxPushCurrent(session.context));
}
TEST(errors_are_planted) {
  run_part("the_second_call_fails", {{"PYCOLLECTIVE_STANDIN_FAIL", "cuMemAlloc:2:2"}});
  run_part("a_context_that_has_failed", {{"PYCOLLECTIVE_STANDIN_FAIL", "cuStreamQuery:1:700"}});
}

TEST(errors_have_names) {
  const char* text = nullptr;
  OK(cu().cuGetErrorName(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, &text));
  CHECK(std::string(text) == "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED");
  OK(cu().cuGetErrorString(CUDA_ERROR_ILLEGAL_ADDRESS, &text));
  CHECK(std::string(text) == "an illegal memory access was encountered");
  EXPECT(CUDA_ERROR_INVALID_VALUE, cu().cuGetErrorName(static_cast<CUresult>(12345), &text));
}

TEST_MAIN
