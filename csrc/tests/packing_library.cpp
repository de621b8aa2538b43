// The codecs of exact packing, one call at a time and with a C ABI, for tests and benchmarks in
// Python (benchmarks/native_parts.py). Of users' processes the engine alone calls them.

#include <cstddef>
#include <cstring>

#include "kernels/pack/pack.h"
#include "tests/kernel_inputs.h"

namespace pycollective {
namespace {

// Null where there is no codec for the type, or this CPU has no such level.
Packing packing_of(const char* dtype, const char* level) {
  const DtypeTraits* const traits = find_named(kDtypeTable, dtype);
  for (const SimdLevel each : levels())
    if (traits != nullptr && std::strcmp(level, name_of(each)) == 0)
      return find_packing(traits->dtype, each);
  return {};
}

}  // namespace
}  // namespace pycollective

extern "C" {

__attribute__((visibility("default"))) bool has_packing(const char* dtype, const char* level) {
  return pycollective::packing_of(dtype, level).pack != nullptr;
}

// As PackFn.
__attribute__((visibility("default"))) std::size_t pack(const char* dtype, const char* level,
                                                        const void* in, std::size_t count,
                                                        void* out) {
  return pycollective::packing_of(dtype, level).pack(in, count, static_cast<std::byte*>(out));
}

// As UnpackFn.
__attribute__((visibility("default"))) bool unpack(const char* dtype, const char* level,
                                                   const void* in, std::size_t bytes, void* out,
                                                   std::size_t count) {
  const auto* const payload = static_cast<const std::byte*>(in);
  return pycollective::packing_of(dtype, level).unpack(payload, bytes, out, count);
}

}  // extern "C"
