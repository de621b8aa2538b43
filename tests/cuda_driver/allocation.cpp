// cuMem... but copies: allocation, pinning, and what an address is.
#include <sys/mman.h>

#include "context.h"
#include "memory.h"
#include "settings.h"
#include "stream.h"

using namespace standin;

CUresult cuMemAlloc_v2(CUdeviceptr* address, size_t bytes) {
  return call(Safety::kUnsafe, [&](const std::shared_ptr<Context>& context) {
    return allocate(*context, bytes, address);
  });
}

CUresult cuMemFree_v2(CUdeviceptr address) {
  return call(Safety::kUnsafe, [&](const std::shared_ptr<Context>& context) {
    if (address == 0) return CUDA_SUCCESS;
    const Place place = find_place(address);
    if (place.kind == Kind::kDevice && place.context != context.get())
      return CUDA_ERROR_INVALID_CONTEXT;
    synchronise(*context);  // as the driver does: what runs may still use it
    const CUresult result = release(address);
    return result == CUDA_SUCCESS ? context->error() : result;
  });
}

CUresult cuMemGetInfo_v2(size_t* free, size_t* total) {
  return call(Safety::kSafe, [&](const std::shared_ptr<Context>& context) {
    if (!free || !total) return CUDA_ERROR_INVALID_VALUE;
    *total = kBytesOfDevice;
    *free = kBytesOfDevice - allocated_bytes(context->device);
    return CUDA_SUCCESS;
  });
}

CUresult cuMemHostAlloc(void** address, size_t bytes, unsigned flags) {
  return call(Safety::kUnsafe, [&](const std::shared_ptr<Context>& context) {
    if (flags > 7) return CUDA_ERROR_INVALID_VALUE;
    return host_allocate(*context, bytes, address);
  });
}

CUresult cuMemFreeHost(void* address) {
  return call(Safety::kUnsafe, [&](const std::shared_ptr<Context>& context) {
    synchronise(*context);
    return host_free(address);
  });
}

CUresult cuMemHostRegister_v2(void* address, size_t bytes, unsigned flags) {
  return call(Safety::kUnsafe, [&](const std::shared_ptr<Context>& context) {
    constexpr unsigned kPortableAndMapped = 3;
    if (flags > kPortableAndMapped) return CUDA_ERROR_NOT_SUPPORTED;
    return host_register(*context, address, bytes);
  });
}

CUresult cuMemHostUnregister(void* address) {
  return call(Safety::kUnsafe, [&](const std::shared_ptr<Context>& context) {
    synchronise(*context);
    return host_unregister(address);
  });
}

CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr* device, void* address, unsigned flags) {
  return call(Safety::kSafe, [&](const std::shared_ptr<Context>&) {
    if (!device || flags != 0) return CUDA_ERROR_INVALID_VALUE;
    const auto number = reinterpret_cast<std::uint64_t>(address);
    if (find_place(number).kind != Kind::kPinned) return CUDA_ERROR_INVALID_VALUE;
    *device = number - emulation_offset();
    return CUDA_SUCCESS;
  });
}

namespace {

// Zero of the attribute's type where the driver knows nothing of the address.
bool answer(CUpointer_attribute attribute, const Place& place, std::uint64_t address, void* out) {
  const bool host = place.kind == Kind::kMapped || place.kind == Kind::kPinned;
  const bool known = host || place.kind == Kind::kDevice;
  const std::uint64_t apart = emulation_offset();
  const auto give = [&](auto value) {
    *static_cast<decltype(value)*>(out) = known ? value : decltype(value){};
    return true;
  };
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
      return give(known ? place.context->handle : nullptr);
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      return give(static_cast<unsigned>(host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE));
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
      return give(
          static_cast<CUdeviceptr>(place.kind == Kind::kPinned ? address - apart : address));
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
      return give(host ? static_cast<void*>(place.seen) : nullptr);
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
      return give(place.id);
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
      return give(0u);
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      return give(known ? place.context->device : 0);
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
      return give(place.kind == Kind::kDevice && !place.imported ? 1u : 0u);
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
      return give(static_cast<CUdeviceptr>(place.start));
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
      return give(place.bytes);
    case CU_POINTER_ATTRIBUTE_MAPPED:
      return give(1u);
  }
  return false;
}

}  // namespace

CUresult cuPointerGetAttributes(unsigned count, CUpointer_attribute* attributes, void** data,
                                CUdeviceptr address) {
  return call(Safety::kSafe, [&](const std::shared_ptr<Context>&) {
    if (count == 0 || !attributes || !data) return CUDA_ERROR_INVALID_VALUE;
    const Place place = find_place(address);
    for (unsigned i = 0; i < count; ++i)
      if (!answer(attributes[i], place, address, data[i])) return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
  });
}
