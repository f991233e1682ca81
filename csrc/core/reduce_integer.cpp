// Kernels of integers and of bits. Sums and products wrap; avg divides the wrapped sum.
#include "core/reduce_kernels.h"

namespace pycomm::kernels {
namespace {

template <typename T>
PYCOMM_INLINE void fold_unsigned(const Block& block) {
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

/// `wrapping` is the kernel of the unsigned type, whose sums and products have the same bits.
template <typename T>
PYCOMM_INLINE void fold_signed(const Block& block, Kernel wrapping) {
  switch (block.op) {
    case ReduceOp::avg:
      return fold<Integer<T>, Avg>(block);
    case ReduceOp::min:
      return fold<Integer<T>, Min>(block);
    case ReduceOp::max:
      return fold<Integer<T>, Max>(block);
    default:
      return wrapping(block);
  }
}

}  // namespace

PYCOMM_SIMD void fold_int8(const Block& block) { fold_signed<int8_t>(block, fold_uint8); }
PYCOMM_SIMD void fold_int16(const Block& block) { fold_signed<int16_t>(block, fold_uint16); }
PYCOMM_SIMD void fold_int32(const Block& block) { fold_signed<int32_t>(block, fold_uint32); }
PYCOMM_SIMD void fold_int64(const Block& block) { fold_signed<int64_t>(block, fold_uint64); }
PYCOMM_SIMD void fold_uint8(const Block& block) { fold_unsigned<uint8_t>(block); }
PYCOMM_SIMD void fold_uint16(const Block& block) { fold_unsigned<uint16_t>(block); }
PYCOMM_SIMD void fold_uint32(const Block& block) { fold_unsigned<uint32_t>(block); }
PYCOMM_SIMD void fold_uint64(const Block& block) { fold_unsigned<uint64_t>(block); }

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
