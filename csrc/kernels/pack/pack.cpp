#include "kernels/pack/pack_levels.h"

namespace pycollective {

Packing find_packing(Dtype dtype, SimdLevel level) {
#if defined(__x86_64__)
  if (level == SimdLevel::kAvx512) return avx512::find_packing(dtype);
  if (level == SimdLevel::kAvx2) return avx2::find_packing(dtype);
#else
  (void)level;
#endif
  return portable::find_packing(dtype);
}

}  // namespace pycollective
