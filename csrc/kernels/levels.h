// Levels: instruction sets that kernels are compiled for.
//
// Each file of kernels (copy.cpp, reduce.cpp, and those in pack/, quantize/ and sparse/) is
// compiled once for each level, with the level's flags. PYCOLLECTIVE_LEVEL names the namespace of
// its functions, so that the linker merges nothing of one level into code that another CPU runs.
#pragma once

namespace pycollective {

enum class SimdLevel : int { kPortable, kAvx2, kAvx512 };
constexpr SimdLevel kSimdLevels[] = {SimdLevel::kPortable, SimdLevel::kAvx2, SimdLevel::kAvx512};

const char* name_of(SimdLevel level);

// The best level that this CPU and operating system can run.
SimdLevel supported_simd_level();

// The level in force: PYCOLLECTIVE_SIMD (portable, avx2, avx512; read once) or the best supported.
// Throws std::invalid_argument for an unknown name or a level that this CPU cannot run.
SimdLevel active_simd_level();

}  // namespace pycollective

// Declares a function for every level, and calls that of one level.
#if defined(__x86_64__)
#define PYCOLLECTIVE_OF_EACH_LEVEL(function) \
  namespace portable {                       \
  function;                                  \
  }                                          \
  namespace avx2 {                           \
  function;                                  \
  }                                          \
  namespace avx512 {                         \
  function;                                  \
  }
#define PYCOLLECTIVE_AT_LEVEL(level, call)      \
  ((level) == SimdLevel::kAvx512 ? avx512::call \
   : (level) == SimdLevel::kAvx2 ? avx2::call   \
                                 : portable::call)
#else
#define PYCOLLECTIVE_OF_EACH_LEVEL(function) \
  namespace portable {                       \
  function;                                  \
  }
#define PYCOLLECTIVE_AT_LEVEL(level, call) (static_cast<void>(level), portable::call)
#endif

// For files of kernels.
#if defined(PYCOLLECTIVE_LEVEL)
#if defined(__x86_64__)
#include <immintrin.h>
#endif
namespace pycollective {
#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif
}  // namespace pycollective
#endif
