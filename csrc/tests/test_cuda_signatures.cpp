// Every type, number and signature of cuda/driver_api.h is <cuda.h>'s: the compiler's word. Where
// there is no <cuda.h>, nothing is checked, and that is said.
//
// <cuda.h> makes macros of many names (cuMemAlloc is cuMemAlloc_v2), so what is ours is taken down
// before it is included.

#include <cstdio>
#include <string_view>
#include <type_traits>

#include "cuda/driver_api.h"

#if __has_include(<cuda.h>)

namespace pycollective::cuda::ours {
#define OWN_FUNCTION(name, version, parameters) using name##_type = CUresult(*) parameters;
PYCOLLECTIVE_CUDA_FUNCTIONS(OWN_FUNCTION)
#define OWN_NUMBER(type, name, value) constexpr long long name##_value = value;
PYCOLLECTIVE_CUDA_NUMBERS(OWN_NUMBER)
using cuGetProcAddress_type = GetProcAddress;
}  // namespace pycollective::cuda::ours

#include <cuda.h>
#include <cudaTypedefs.h>

namespace pycollective::cuda {
namespace {

// Whether a call with `Own` in the place of `Theirs` passes and returns the same.
template <class Own, class Theirs>
constexpr bool matches() {
  if constexpr (std::is_same_v<Own, Theirs>) {
    return true;
  } else if constexpr (std::is_pointer_v<Own> && std::is_pointer_v<Theirs>) {
    using A = std::remove_pointer_t<Own>;
    using B = std::remove_pointer_t<Theirs>;
    return std::is_const_v<A> == std::is_const_v<B> &&
           matches<std::remove_const_t<A>, std::remove_const_t<B>>();
  } else if constexpr (std::is_enum_v<Own> && std::is_enum_v<Theirs>) {
    return sizeof(Own) == sizeof(Theirs);
  } else if constexpr (std::is_integral_v<Own> && std::is_integral_v<Theirs>) {
    return sizeof(Own) == sizeof(Theirs) && std::is_signed_v<Own> == std::is_signed_v<Theirs>;
  } else {
    return false;
  }
}

// The opaque things, and what is passed by value.
#define SAME_HANDLE(name)                  \
  template <>                              \
  constexpr bool matches<name, ::name>() { \
    return true;                           \
  }
SAME_HANDLE(CUctx_st)
SAME_HANDLE(CUmod_st)
SAME_HANDLE(CUfunc_st)
SAME_HANDLE(CUstream_st)
SAME_HANDLE(CUevent_st)
SAME_HANDLE(CUgraph_st)
SAME_HANDLE(CUgraphNode_st)

#define SAME_STRUCT(name)                                                                    \
  static_assert(sizeof(name) == sizeof(::name) && alignof(name) == alignof(::name));         \
  static_assert(std::is_trivially_copyable_v<name> && std::is_trivially_copyable_v<::name>); \
  SAME_HANDLE(name)
SAME_STRUCT(CUuuid)
SAME_STRUCT(CUipcMemHandle)

template <class Own, class Theirs>
struct Signatures {
  static constexpr bool kMatch = false;
};
template <class... Own, class... Theirs>
struct Signatures<CUresult (*)(Own...), ::CUresult (*)(Theirs...)> {
  static constexpr bool all() {
    if constexpr (sizeof...(Own) != sizeof...(Theirs))
      return false;
    else
      return (matches<Own, Theirs>() && ...);
  }
  static constexpr bool kMatch = all() && sizeof(CUresult) == sizeof(::CUresult);
};

// Its version is asked for by name, and the header takes a later one today.
constexpr bool is_older(std::string_view name) { return name == "cuStreamGetCaptureInfo"; }

// That of the version that is asked for, and that which the header takes today.
#define CHECK_FUNCTION(name, version, parameters)                                       \
  static_assert(Signatures<ours::name##_type, PFN_##name##_v##version>::kMatch, #name); \
  static_assert(is_older(#name) || Signatures<ours::name##_type, decltype(&::name)>::kMatch, #name);
PYCOLLECTIVE_CUDA_FUNCTIONS(CHECK_FUNCTION)
CHECK_FUNCTION(cuGetProcAddress, 12000, )

}  // namespace
}  // namespace pycollective::cuda

// Outside of the namespace, where ours would be found.
#define THEIR_NUMBER(type, name, value) \
  static_assert(pycollective::cuda::ours::name##_value == static_cast<long long>(name), #name);
PYCOLLECTIVE_CUDA_NUMBERS(THEIR_NUMBER)

// The checker itself can say no.
namespace pycollective::cuda {
static_assert(!Signatures<CUresult (*)(int), ::CUresult (*)(unsigned)>::kMatch);
static_assert(!Signatures<CUresult (*)(void*), ::CUresult (*)(const void*)>::kMatch);
static_assert(!Signatures<CUresult (*)(CUstream), ::CUresult (*)(::CUevent)>::kMatch);
static_assert(!Signatures<CUresult (*)(int), ::CUresult (*)(int, int)>::kMatch);
static_assert(!Signatures<CUresult (*)(unsigned), ::CUresult (*)(std::size_t)>::kMatch);
}  // namespace pycollective::cuda

int main() {
  std::puts("the driver's signatures are those of <cuda.h>");
  return 0;
}

#else

int main() {
  std::puts("no <cuda.h>: the driver's signatures are not checked");
  return 0;
}

#endif
