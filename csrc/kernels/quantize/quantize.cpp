#include "kernels/quantize/quantize.h"

#include "kernels/quantize/quantize_levels.h"

namespace pycollective {

Quantizing find_quantizing(QuantizeCodec codec, Dtype dtype, SimdLevel level) {
#if defined(__x86_64__)
  if (level == SimdLevel::kAvx512) return avx512::find_quantizing(codec, dtype);
  if (level == SimdLevel::kAvx2) return avx2::find_quantizing(codec, dtype);
#else
  (void)level;
#endif
  return portable::find_quantizing(codec, dtype);
}

}  // namespace pycollective
