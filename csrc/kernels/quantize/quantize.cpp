#include "kernels/quantize/quantize.h"

#include "kernels/quantize/quantize_levels.h"

namespace pycollective {

QuantizeCodecs quantize_codecs(SimdLevel level) {
#if defined(__x86_64__)
  if (level == SimdLevel::kAvx512) return avx512::quantize_codecs();
  if (level == SimdLevel::kAvx2) return avx2::quantize_codecs();
#else
  (void)level;
#endif
  return portable::quantize_codecs();
}

}  // namespace pycollective
