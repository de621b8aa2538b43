#include <cstdlib>
#include <stdexcept>
#include <string>

#include "kernels/kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <xmmintrin.h>
#elif !defined(__aarch64__)
#include <cfenv>
#endif

namespace pycollective {
namespace {

SimdLevel detect_simd_level() {
#if defined(__x86_64__)
  // The builtin asks the CPU and whether the operating system keeps the registers. It knows f16c
  // from GCC 11 on only; its registers are those of AVX2.
  unsigned eax, ebx, ecx, edx;
  const bool f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
  if (!f16c || !__builtin_cpu_supports("avx2")) return SimdLevel::kPortable;
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
    return SimdLevel::kAvx512;
  return SimdLevel::kAvx2;
#else
  return SimdLevel::kPortable;
#endif
}

SimdLevel level_from_environment() {
  const char* wanted = std::getenv("PYCOLLECTIVE_SIMD");
  const SimdLevel best = supported_simd_level();
  if (wanted == nullptr || *wanted == '\0') return best;
  for (const SimdLevel level : kSimdLevels) {
    if (std::string(wanted) != name_of(level)) continue;
    if (level > best)
      throw std::invalid_argument(std::string("PYCOLLECTIVE_SIMD=") + wanted +
                                  ": this CPU cannot run it; the best here is " + name_of(best));
    return level;
  }
  throw std::invalid_argument(std::string("PYCOLLECTIVE_SIMD=") + wanted +
                              " is not one of portable, avx2, avx512");
}

}  // namespace

const char* name_of(SimdLevel level) {
  switch (level) {
    case SimdLevel::kAvx512:
      return "avx512";
    case SimdLevel::kAvx2:
      return "avx2";
    default:
      return "portable";
  }
}

SimdLevel supported_simd_level() {
  // Asked once: under a hypervisor a cpuid takes microseconds.
  static const SimdLevel supported = detect_simd_level();
  return supported;
}

SimdLevel active_simd_level() {
  static const SimdLevel level = level_from_environment();
  return level;
}

#if defined(__x86_64__)

FloatEnvironment::FloatEnvironment() : saved_(_mm_getcsr()) {
  constexpr unsigned kIeee = 0x1F80;  // round to nearest, nothing flushed, no traps
  _mm_setcsr(kIeee);
}
FloatEnvironment::~FloatEnvironment() { _mm_setcsr(static_cast<unsigned>(saved_)); }

#elif defined(__aarch64__)

FloatEnvironment::FloatEnvironment() {
  asm volatile("mrs %0, fpcr" : "=r"(saved_));
  asm volatile("msr fpcr, %0" ::"r"(0UL));
}
FloatEnvironment::~FloatEnvironment() { asm volatile("msr fpcr, %0" ::"r"(saved_)); }

#else

FloatEnvironment::FloatEnvironment() : saved_(static_cast<unsigned long>(std::fegetround())) {
  std::fesetround(FE_TONEAREST);
}
FloatEnvironment::~FloatEnvironment() { std::fesetround(static_cast<int>(saved_)); }

#endif

}  // namespace pycollective
