// Kernels of integers and of bits. Sums and products wrap; avg divides the wrapped sum.
#include "core/reduce_kernels.h"

namespace pycomm::kernels {
namespace {

template <typename T>
PYCOMM_INLINE void fold_integer(const Block& block) {
  switch (block.op) {
    case ReduceOp::sum:
      return fold<Integer<T>, Sum>(block);
    case ReduceOp::avg:
      return fold<Integer<T>, Avg>(block);
    case ReduceOp::prod:
      return fold<Integer<T>, Prod>(block);
    case ReduceOp::min:
      return fold<Integer<T>, Min>(block);
    case ReduceOp::max:
      return fold<Integer<T>, Max>(block);
    default:
      return;
  }
}

}  // namespace

PYCOMM_SIMD void fold_int8(const Block& block) { fold_integer<int8_t>(block); }
PYCOMM_SIMD void fold_int16(const Block& block) { fold_integer<int16_t>(block); }
PYCOMM_SIMD void fold_int32(const Block& block) { fold_integer<int32_t>(block); }
PYCOMM_SIMD void fold_int64(const Block& block) { fold_integer<int64_t>(block); }
PYCOMM_SIMD void fold_uint8(const Block& block) { fold_integer<uint8_t>(block); }
PYCOMM_SIMD void fold_uint16(const Block& block) { fold_integer<uint16_t>(block); }
PYCOMM_SIMD void fold_uint32(const Block& block) { fold_integer<uint32_t>(block); }
PYCOMM_SIMD void fold_uint64(const Block& block) { fold_integer<uint64_t>(block); }

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
