// Device memory that the host cannot touch, pinned memory of two numbers, and pointers of the
// wrong kind.
#include <sys/resource.h>

#include <set>

#include "test_session.h"

using namespace standin::testing;

TEST(copies_and_kernels_see_device_memory) {
  const Session session;
  const CUstream stream = new_stream();
  const CUdeviceptr from = device_words(1000), to = device_words(1000);
  OK(cu().cuMemsetD32Async(from, 7, 1000, stream));
  OK(launch(session.function("test_copy"), kernels::Copy{at(from), at(to), 1000}, 2, 64, stream));
  CHECK(read(to, 1000, stream) == std::vector<std::uint32_t>(1000, 7));
  OK(cu().cuMemsetD32Async(from, 8, 1000, stream));
  OK(cu().cuMemcpyAsync(to + 4, from, 4 * 999, stream));
  CHECK(read(to, 1, stream)[0] == 7 && read(to + 4 * 999, 1, stream)[0] == 8);
}

PART(host_reads_device_memory) {
  const Session session;
  const CUdeviceptr address = device_words(16);
  to_parent(1);
  const volatile std::uint32_t* const word = at(address);
  to_parent(std::uint32_t{*word});
}
PART(host_writes_device_memory) {
  const Session session;
  const CUdeviceptr address = device_words(16);
  to_parent(1);
  *const_cast<volatile std::uint32_t*>(at(address)) = 1;
  to_parent(1);
}
TEST(host_access_faults) {
  for (const char* part : {"host_reads_device_memory", "host_writes_device_memory"}) {
    const Process process(part);
    CHECK(process.receive<int>() == 1);
    CHECK(faulted(process.end().second));
  }
}

TEST(fresh_memory_holds_no_numbers) {
  const Session session;
  const CUstream stream = new_stream();
  CHECK(read(device_words(64), 64, stream) == std::vector<std::uint32_t>(64, 0xffffffff));
}

PART(kernel_reads_freed_memory) {
  const Session session;
  const CUstream stream = new_stream();
  const CUdeviceptr freed = device_words(64), to = device_words(64);
  OK(cu().cuMemFree(freed));
  OK(launch(session.function("test_copy"), kernels::Copy{at(freed), at(to), 64}, 1, 64, stream));
  EXPECT(CUDA_ERROR_ILLEGAL_ADDRESS, cu().cuStreamSynchronize(stream));
  // Sticky: of every later call.
  CUdeviceptr address;
  EXPECT(CUDA_ERROR_ILLEGAL_ADDRESS, cu().cuMemAlloc(&address, 4));
  EXPECT(CUDA_ERROR_ILLEGAL_ADDRESS, cu().cuStreamQuery(stream));
}
TEST(freed_memory_is_gone) {
  const std::string said = run_part("kernel_reads_freed_memory");
  CHECK(said.find("kernel `test_copy`") != std::string::npos);
  const Session session;
  const CUstream stream = new_stream();
  const CUdeviceptr freed = device_words(64);
  OK(cu().cuMemFree(freed));
  EXPECT(CUDA_ERROR_INVALID_VALUE, cu().cuMemFree(freed));
  EXPECT(CUDA_ERROR_INVALID_VALUE, cu().cuMemsetD32Async(freed, 0, 1, stream));
}

TEST(no_address_is_given_twice) {
  const Session session;
  std::set<CUdeviceptr> seen;
  for (int i = 0; i < 200; ++i) {
    const CUdeviceptr address = device_words(100);
    CHECK(seen.insert(address).second && address % 512 == 0);
    OK(cu().cuMemFree(address));
  }
}

PART(kernel_gets_host_pointer) {
  const Session session;
  void* pinned = nullptr;
  OK(cu().cuMemHostAlloc(&pinned, 256, 0));
  const CUstream stream = new_stream();
  // The pinned memory's own address is no device's pointer.
  OK(launch(session.function("test_copy"),
            kernels::Copy{static_cast<std::uint32_t*>(pinned), at(device_words(64)), 64}, 1, 64,
            stream));
  EXPECT(CUDA_ERROR_ILLEGAL_ADDRESS, cu().cuStreamSynchronize(stream));
}
TEST(host_pointer_in_a_kernel_is_refused) {
  CHECK(run_part("kernel_gets_host_pointer").find("the host's") != std::string::npos);
}

TEST(copies_refuse_the_wrong_kind) {
  const Session session;
  const CUstream stream = new_stream();
  const CUdeviceptr device = device_words(64);
  std::uint32_t host[64] = {};
  void* pinned = nullptr;
  OK(cu().cuMemHostAlloc(&pinned, 256, 0));
  CUdeviceptr mapped = 0;
  OK(cu().cuMemHostGetDevicePointer(&mapped, pinned, 0));
  CHECK(at<void>(mapped) != pinned);
  const auto number = [](void* p) { return reinterpret_cast<CUdeviceptr>(p); };
  EXPECT(CUDA_ERROR_INVALID_VALUE, cu().cuMemcpyHtoDAsync(device, at<void>(device), 4, stream));
  EXPECT(CUDA_ERROR_INVALID_VALUE, cu().cuMemcpyHtoDAsync(number(host), host, 4, stream));
  EXPECT(CUDA_ERROR_INVALID_VALUE, cu().cuMemcpyHtoDAsync(number(pinned), host, 4, stream));
  EXPECT(CUDA_ERROR_INVALID_VALUE, cu().cuMemcpyHtoDAsync(device, at<void>(mapped), 4, stream));
  EXPECT(CUDA_ERROR_INVALID_VALUE, cu().cuMemcpyDtoHAsync(at<void>(device), device, 4, stream));
  EXPECT(CUDA_ERROR_INVALID_VALUE, cu().cuMemcpyDtoHAsync(host, number(host), 4, stream));
  EXPECT(CUDA_ERROR_INVALID_VALUE, cu().cuMemsetD32Async(number(host), 0, 1, stream));
  EXPECT(CUDA_ERROR_INVALID_VALUE, cu().cuMemcpyAsync(device, device + 252, 8, stream));
  EXPECT(CUDA_ERROR_INVALID_VALUE, cu().cuMemsetD32Async(device, 0, 65, stream));
  EXPECT(CUDA_ERROR_INVALID_VALUE, cu().cuMemsetD32Async(device + 2, 0, 1, stream));
  // Where kernels see device memory is no address for a program, either.
  const CUdeviceptr alias = device + (number(pinned) - mapped);
  EXPECT(CUDA_ERROR_INVALID_VALUE, cu().cuMemcpyAsync(device, alias, 4, stream));
  EXPECT(CUDA_ERROR_INVALID_VALUE, cu().cuMemHostRegister(at<void>(alias), 4, 0));
  OK(cu().cuMemcpyAsync(mapped, device, 256, stream));
  OK(cu().cuStreamSynchronize(stream));
  CHECK(static_cast<std::uint32_t*>(pinned)[63] == 0xffffffff);
}

TEST(registered_memory) {
  const Session session;
  const CUstream stream = new_stream();
  std::vector<std::uint32_t> host(4096, 5);
  CUdeviceptr mapped = 0;
  EXPECT(CUDA_ERROR_INVALID_VALUE, cu().cuMemHostGetDevicePointer(&mapped, host.data(), 0));
  OK(cu().cuMemHostRegister(host.data(), 4 * 4096, 0));
  EXPECT(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, cu().cuMemHostRegister(host.data() + 8, 4, 0));
  OK(cu().cuMemHostGetDevicePointer(&mapped, host.data() + 4, 0));
  CUdeviceptr to = device_words(64);
  OK(launch(session.function("test_copy"), kernels::Copy{at(mapped), at(to), 64}, 1, 64, stream));
  CHECK(read(to, 64, stream)[63] == 5);
  EXPECT(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, cu().cuMemHostUnregister(host.data() + 4));
  EXPECT(CUDA_ERROR_INVALID_VALUE, cu().cuMemFreeHost(host.data()));
  OK(cu().cuMemHostUnregister(host.data()));
  EXPECT(CUDA_ERROR_INVALID_VALUE, cu().cuMemHostGetDevicePointer(&mapped, host.data(), 0));
  EXPECT(CUDA_ERROR_INVALID_VALUE, cu().cuMemHostRegister(at<void>(4096), 4096, 0));
}

TEST(what_an_address_is) {
  const Session session;
  const CUdeviceptr device = device_words(64);
  void* pinned = nullptr;
  OK(cu().cuMemHostAlloc(&pinned, 256, 0));
  unsigned type = 9;
  CUdeviceptr start = 0;
  size_t bytes = 0;
  int ordinal = -1;
  CUpointer_attribute attributes[] = {
      CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
      CU_POINTER_ATTRIBUTE_RANGE_SIZE, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL};
  void* data[] = {&type, &start, &bytes, &ordinal};
  OK(cu().cuPointerGetAttributes(4, attributes, data, device + 100));
  CHECK(type == CU_MEMORYTYPE_DEVICE && start == device && bytes == 256 && ordinal == 0);
  OK(cu().cuPointerGetAttributes(1, attributes, data, reinterpret_cast<CUdeviceptr>(pinned)));
  CHECK(type == CU_MEMORYTYPE_HOST);
  OK(cu().cuPointerGetAttributes(4, attributes, data, reinterpret_cast<CUdeviceptr>(&type)));
  CHECK(type == 0 && bytes == 0);
}

TEST(memory_ends) {
  const Session session;
  size_t free = 0, total = 0;
  const CUdeviceptr some = device_words(1 << 20);
  OK(cu().cuMemGetInfo(&free, &total));
  CHECK(total - free == 4 << 20);
  CUdeviceptr address;
  EXPECT(CUDA_ERROR_OUT_OF_MEMORY, cu().cuMemAlloc(&address, free + 1));
  EXPECT(CUDA_ERROR_INVALID_VALUE, cu().cuMemAlloc(&address, 0));
  OK(cu().cuMemFree(some));
  OK(cu().cuMemGetInfo(&free, &total));
  CHECK(free == total);
}

PART(writes_past_the_end) {
  const Session session;
  const CUstream stream = new_stream();
  const CUdeviceptr address = device_words(10);
  OK(launch(session.function("test_writes_past"), kernels::Copy{nullptr, at(address), 10}, 1, 1,
            stream));
  OK(cu().cuStreamSynchronize(stream));
  EXPECT(CUDA_ERROR_ILLEGAL_ADDRESS, cu().cuMemFree(address));
}
TEST(a_write_past_the_end_is_found) {
  const auto [said, status] = Process("writes_past_the_end").end();
#if defined(__SANITIZE_ADDRESS__)
  CHECK(!ended_well(status) && said.find("use-after-poison") != std::string::npos);
#else
  CHECK(ended_well(status) && said.find("past its end") != std::string::npos);
#endif
}

PART(writes_far_past_the_end) {
  const Session session;
  const CUstream stream = new_stream();
  OK(launch(session.function("test_writes_past"),
            kernels::Copy{nullptr, at(device_words(10)), 4096}, 1, 1, stream));
  OK(cu().cuStreamSynchronize(stream));
}
TEST(a_fault_in_a_kernel_is_named) {
  const auto [said, status] = Process("writes_far_past_the_end").end();
  CHECK(faulted(status));
#if !defined(__SANITIZE_ADDRESS__)
  CHECK(said.find("kernel `test_writes_past`, block 0, thread 0: fault") != std::string::npos);
#endif
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // which need more addresses
PART(few_addresses) {
  const rlimit limit{std::uint64_t{3} << 30, std::uint64_t{3} << 30};
  CHECK(setrlimit(RLIMIT_AS, &limit) == 0);
  const Session session;
  const CUstream stream = new_stream();
  CHECK(read(device_words(64), 64, stream)[0] == 0xffffffff);
}
TEST(limited_addresses_are_enough) { run_part("few_addresses"); }
#endif

TEST_MAIN
