// Kernels of the 16- and 8-bit floats: decoded to float32, folded, rounded once.
#include "core/reduce_kernels.h"

namespace pycomm::kernels {

PYCOMM_SIMD void fold_float16(const Block& block) {
  fold_float<SmallFloat<pycomm::Float16, uint16_t>>(block);
}
PYCOMM_SIMD void fold_bfloat16(const Block& block) {
  fold_float<SmallFloat<pycomm::BFloat16, uint16_t>>(block);
}
PYCOMM_SIMD void fold_float8_e4m3(const Block& block) {
  fold_float<SmallFloat<pycomm::Float8E4M3, uint8_t>>(block);
}
PYCOMM_SIMD void fold_float8_e5m2(const Block& block) {
  fold_float<SmallFloat<pycomm::Float8E5M2, uint8_t>>(block);
}

}  // namespace pycomm::kernels
