// Kernels of integers and of bits. Sums and products wrap; avg divides the wrapped sum.
#include "core/reduce_kernels.h"

namespace pycomm::kernels {

PYCOMM_SIMD void fold_int8(const Block& block) { fold_numbers<Integer<int8_t>>(block); }
PYCOMM_SIMD void fold_int16(const Block& block) { fold_numbers<Integer<int16_t>>(block); }
PYCOMM_SIMD void fold_int32(const Block& block) { fold_numbers<Integer<int32_t>>(block); }
PYCOMM_SIMD void fold_int64(const Block& block) { fold_numbers<Integer<int64_t>>(block); }
PYCOMM_SIMD void fold_uint8(const Block& block) { fold_numbers<Integer<uint8_t>>(block); }
PYCOMM_SIMD void fold_uint16(const Block& block) { fold_numbers<Integer<uint16_t>>(block); }
PYCOMM_SIMD void fold_uint32(const Block& block) { fold_numbers<Integer<uint32_t>>(block); }
PYCOMM_SIMD void fold_uint64(const Block& block) { fold_numbers<Integer<uint64_t>>(block); }

PYCOMM_SIMD void fold_bits(const Block& block) {
  switch (block.op) {
    case ReduceOp::band:
      return fold<Integer<uint8_t>, Band>(block);
    case ReduceOp::bor:
      return fold<Integer<uint8_t>, Bor>(block);
    case ReduceOp::bxor:
      return fold<Integer<uint8_t>, Bxor>(block);
    default:
      return;
  }
}

}  // namespace pycomm::kernels
