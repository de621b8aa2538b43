// What the sanitizers must be told: which fiber runs, what orders what, which memory is whose.
// Empty without them. STANDIN_TSAN is set for files that are built without TSan beside ones with
// it.
#pragma once

#include <cstddef>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(STANDIN_TSAN) || defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif

namespace standin {

inline void poison([[maybe_unused]] const void* at, [[maybe_unused]] std::size_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
  __asan_poison_memory_region(at, bytes);
#endif
}

inline void unpoison([[maybe_unused]] const void* at, [[maybe_unused]] std::size_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(at, bytes);
#endif
}

// All that happened before orders_before(token) happened before what follows orders_after(token).
inline void orders_before([[maybe_unused]] void* token) {
#if defined(STANDIN_TSAN) || defined(__SANITIZE_THREAD__)
  __tsan_release(token);
#endif
}

inline void orders_after([[maybe_unused]] void* token) {
#if defined(STANDIN_TSAN) || defined(__SANITIZE_THREAD__)
  __tsan_acquire(token);
#endif
}

}  // namespace standin
