// What kernels use of CUDA, on a machine without it: the names of csrc/cuda/device.h, the same
// sources compiled as C++. A block's threads are fibers of the stream's thread (launch.cpp).
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

// A kernel, and its row in the table from which modules of the stand-in take their functions.
#define KERNEL(name, Parameters)                                                            \
  static void name##_emulated(const Parameters& p);                                         \
  static ::pycollective::cuda::emulated::Kernel name##_row{                                 \
      #name, sizeof(Parameters),                                                            \
      [](const void* p) { name##_emulated(*static_cast<const Parameters*>(p)); }, nullptr}; \
  [[maybe_unused]] static const bool name##_added =                                         \
      ::pycollective::cuda::emulated::add(name##_row);                                      \
  static void name##_emulated([[maybe_unused]] const Parameters& p)

// The block's own, and full of no numbers, as on a GPU. A statement of a kernel, or of a function
// that kernels call; each place in the source is one variable of a block.
#define SHARED(type, name)                                     \
  static const char name##_site = 0;                           \
  auto& name = *static_cast<::std::remove_reference_t<type>*>( \
      ::pycollective::cuda::emulated::shared(&name##_site, sizeof(type), alignof(type)))

namespace pycollective::cuda {

constexpr int kMostThreads = 64;  // of a block

namespace emulated {

struct Kernel {
  const char* name;
  std::size_t parameter_bytes;
  void (*body)(const void* parameters);
  Kernel* next;
};
bool add(Kernel& kernel);

// Where kernels find what a program names by a device's address. Another's ends the kernel, as
// an illegal access does.
void* visible(const volatile void* address);
void* shared(const void* site, std::size_t bytes, std::size_t alignment);
// Before a load of a word that others write: a fiber that looks again gives way first.
void looks_at(const void* word);
// After a store that others wait for.
void has_published();
bool meet(bool flag, const char* what, int line);

}  // namespace emulated

unsigned thread();
unsigned threads();
unsigned block();
unsigned blocks();

// Null stays null. One past an allocation's end is none of its addresses.
template <class T>
T* visible(T* pointer) {
  return static_cast<T*>(emulated::visible(pointer));
}

inline std::uint32_t load_acquire(const std::uint32_t* word) {
  emulated::looks_at(word);
  return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

inline void store_release(std::uint32_t* word, std::uint32_t value) {
  __atomic_store_n(word, value, __ATOMIC_RELEASE);
  emulated::has_published();
}

inline std::uint32_t load_relaxed(const std::uint32_t* word) {
  emulated::looks_at(word);
  return __atomic_load_n(word, __ATOMIC_RELAXED);
}

inline void barrier(int line = __builtin_LINE()) { emulated::meet(false, "barrier", line); }
inline bool barrier_or(bool flag, int line = __builtin_LINE()) {
  return emulated::meet(flag, "barrier_or", line);
}

std::uint64_t nanoseconds();
void pause();

}  // namespace pycollective::cuda
