// Copies and fills. Addresses are checked at the call, as the driver does; bytes move later, on
// the stream's thread.
#include <cstring>

#include "capture.h"
#include "memory.h"
#include "stream.h"

namespace standin {
namespace {

CUresult check(const Place& place, std::uint64_t address, std::size_t bytes,
               const Context& context) {
  const bool device = place.kind == Kind::kDevice;
  if (place.kind == Kind::kForbidden || !place.holds(address, bytes))
    return CUDA_ERROR_INVALID_VALUE;
  if (device && place.context != &context && !context.reaches(place.context->device))
    return CUDA_ERROR_INVALID_CONTEXT;
  return CUDA_SUCCESS;
}

// Aligned words come whole, as on a GPU, so that a copy or a fill may meet what kernels write and
// read as words, and a release is one to who copies it. (Only TSan sees a difference.)
void move(char* to, const char* from, std::size_t bytes) {
#if defined(__SANITIZE_THREAD__)
  const bool overlap = to < from + bytes && from < to + bytes;
  const auto address = reinterpret_cast<std::uintptr_t>(from);
  if (address % 4 == 0 && bytes % 4 == 0 && !overlap) {
    for (std::size_t i = 0; i < bytes; i += 4) {
      const std::uint32_t word =
          __atomic_load_n(reinterpret_cast<const std::uint32_t*>(from + i), __ATOMIC_ACQUIRE);
      std::memcpy(to + i, &word, 4);
    }
    return;
  }
#endif
  std::memmove(to, from, bytes);
}

}  // namespace
}  // namespace standin

using namespace standin;

CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream handle) {
  return call(Safety::kSafe, [&](const std::shared_ptr<Context>& context) {
    const std::shared_ptr<Stream> stream = find_stream(context, handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if (bytes == 0) return CUDA_SUCCESS;
    const Place target = find_place(to), source = find_place(from);
    if (const CUresult error = check(target, to, bytes, *context)) return error;
    if (const CUresult error = check(source, from, bytes, *context)) return error;
    const bool pageable = target.kind == Kind::kPageable || source.kind == Kind::kPageable;
    if (pageable)  // the call waits for it, which a capture cannot
      if (const CUresult error = forbidden_while_capturing(stream)) return error;
    Ticket ticket;
    const CUresult error =
        submit(stream, [=](Context&, Random&) { move(target.seen, source.seen, bytes); }, &ticket);
    if (error != CUDA_SUCCESS || !pageable) return error;
    ticket.wait();
    return context->error();
  });
}

CUresult cuMemsetD32Async(CUdeviceptr address, unsigned value, size_t count, CUstream handle) {
  return call(Safety::kSafe, [&](const std::shared_ptr<Context>& context) {
    const std::shared_ptr<Stream> stream = find_stream(context, handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if (address % 4 != 0 || count > std::size_t{1} << 48) return CUDA_ERROR_INVALID_VALUE;
    if (count == 0) return CUDA_SUCCESS;
    const Place place = find_place(address);
    if (place.kind == Kind::kPinned || place.kind == Kind::kPageable)
      return CUDA_ERROR_INVALID_VALUE;
    if (const CUresult error = check(place, address, 4 * count, *context)) return error;
    return submit(stream, [=](Context&, Random&) {
      auto* const words = reinterpret_cast<std::uint32_t*>(place.seen);
      for (std::size_t i = 0; i < count; ++i) __atomic_store_n(words + i, value, __ATOMIC_RELAXED);
    });
  });
}
