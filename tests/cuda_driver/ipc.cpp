// What goes between processes: memory, named by the process that made it and a descriptor of its.
// Another process of the same user opens it through /proc.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "context.h"
#include "memory.h"
#include "settings.h"
#include "stream.h"

namespace standin {
namespace {

struct Name {
  std::uint32_t magic;
  std::int32_t process;
  std::uint64_t started;  // by which another process of the same number is told apart
  std::int32_t descriptor;
  std::int32_t device;  // its own number, not the ordinal
  std::uint64_t offset, bytes, nonce;
};
static_assert(sizeof(Name) <= sizeof(CUipcMemHandle));
constexpr std::uint32_t kMemory = 0x4d656d31;

// In clock ticks since the machine's start; 0 where there is no such process.
std::uint64_t start_of(std::int32_t process) {
  std::FILE* const file = std::fopen(("/proc/" + std::to_string(process) + "/stat").c_str(), "re");
  if (!file) return 0;
  char text[1024] = {};
  const std::size_t length = std::fread(text, 1, sizeof text - 1, file);
  std::fclose(file);
  const char* at = length > 0 ? std::strrchr(text, ')') : nullptr;  // the name may hold spaces
  for (int field = 2; at && field < 22; ++field) at = std::strchr(at + 1, ' ');
  return at ? std::strtoull(at, nullptr, 10) : 0;
}

Name own_name(int descriptor, int ordinal) {
  Name name{};
  name.magic = kMemory;
  name.process = getpid();
  name.started = start_of(name.process);
  name.descriptor = descriptor;
  name.device = settings().devices[static_cast<std::size_t>(ordinal)];
  return name;
}

// Opens what another process named. The handle is of the same device, or devices can map peers.
CUresult open_named(const Name& name, const Context& context, int* opened) {
  if (name.magic != kMemory) return CUDA_ERROR_INVALID_VALUE;
  const bool own = name.process == getpid() && name.started == start_of(name.process);
  if (own) return CUDA_ERROR_INVALID_CONTEXT;
  const int device = settings().devices[static_cast<std::size_t>(context.device)];
  if (name.device != device && !settings().peers) return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
  const std::string path =
      "/proc/" + std::to_string(name.process) + "/fd/" + std::to_string(name.descriptor);
  *opened = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (*opened < 0) return CUDA_ERROR_MAP_FAILED;
  if (name.started == start_of(name.process)) return CUDA_SUCCESS;
  close(*opened);
  return CUDA_ERROR_MAP_FAILED;
}

}  // namespace

}  // namespace standin

using namespace standin;

CUresult cuIpcGetMemHandle(CUipcMemHandle* handle, CUdeviceptr address) {
  return call(Safety::kUnsafe, [&](const std::shared_ptr<Context>& context) {
    if (!handle) return CUDA_ERROR_INVALID_VALUE;
    if (const Place place = find_place(address);
        place.kind == Kind::kDevice && place.context != context.get())
      return CUDA_ERROR_INVALID_CONTEXT;
    Exported exported;
    if (const CUresult error = export_memory(address, &exported)) return error;
    Name name = own_name(exported.descriptor, context->device);
    name.offset = exported.offset;
    name.bytes = exported.bytes;
    name.nonce = exported.nonce;
    std::memset(handle, 0, sizeof *handle);
    std::memcpy(handle, &name, sizeof name);
    return CUDA_SUCCESS;
  });
}

CUresult cuIpcOpenMemHandle_v2(CUdeviceptr* address, CUipcMemHandle handle, unsigned flags) {
  return call(Safety::kUnsafe, [&](const std::shared_ptr<Context>& context) {
    if (!address || flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) return CUDA_ERROR_INVALID_VALUE;
    Name name;
    std::memcpy(&name, &handle, sizeof name);
    int descriptor = -1;
    if (const CUresult error = open_named(name, *context, &descriptor)) return error;
    const CUresult result = import_memory(
        *context, descriptor, {descriptor, name.offset, name.bytes, name.nonce}, address);
    close(descriptor);
    return result;
  });
}

CUresult cuIpcCloseMemHandle(CUdeviceptr address) {
  return call(Safety::kUnsafe, [&](const std::shared_ptr<Context>& context) {
    synchronise(*context);
    return close_import(*context, address);
  });
}
