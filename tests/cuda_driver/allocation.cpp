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

CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr* device, void* address, unsigned flags) {
  return call(Safety::kSafe, [&](const std::shared_ptr<Context>&) {
    if (!device || flags != 0) return CUDA_ERROR_INVALID_VALUE;
    const auto number = reinterpret_cast<std::uint64_t>(address);
    if (find_place(number).kind != Kind::kPinned) return CUDA_ERROR_INVALID_VALUE;
    *device = number - emulation_offset();
    return CUDA_SUCCESS;
  });
}

CUresult cuPointerGetAttributes(unsigned count, CUpointer_attribute* attributes, void** data,
                                CUdeviceptr address) {
  return call(Safety::kSafe, [&](const std::shared_ptr<Context>&) {
    if (count == 0 || !attributes || !data) return CUDA_ERROR_INVALID_VALUE;
    const Place place = find_place(address);
    // Zero where the driver knows nothing of the address.
    const bool known = place.context != nullptr;
    for (unsigned i = 0; i < count; ++i) switch (attributes[i]) {
        case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
          *static_cast<unsigned*>(data[i]) = 0;
          if (known)
            *static_cast<unsigned*>(data[i]) =
                place.kind == Kind::kDevice ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
          break;
        case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
          *static_cast<int*>(data[i]) = known ? place.context->device : 0;
          break;
        default:
          return CUDA_ERROR_INVALID_VALUE;
      }
    return CUDA_SUCCESS;
  });
}
