// Kernels of integers and of bits. Sums and products wrap; avg divides the wrapped sum.
#include "core/reduce_kernels.h"

namespace pycomm::kernels {
namespace {

bool wraps(const Block& block) { return block.op == ReduceOp::sum || block.op == ReduceOp::prod; }

/// Sums and products, which have the same bits for signed and unsigned integers.
template <typename T>
PYCOMM_INLINE void fold_wrapping(const Block& block) {
  block.op == ReduceOp::sum ? fold<Integer<T>, Sum>(block) : fold<Integer<T>, Prod>(block);
}

template <typename T>
PYCOMM_INLINE void fold_other(const Block& block) {
  switch (block.op) {
    case ReduceOp::avg:
      return fold<Integer<T>, Avg>(block);
    case ReduceOp::min:
      return fold<Integer<T>, Min>(block);
    case ReduceOp::max:
      return fold<Integer<T>, Max>(block);
    default:
      return;
  }
}

}  // namespace

PYCOMM_SIMD void fold_uint8(const Block& block) {
  wraps(block) ? fold_wrapping<uint8_t>(block) : fold_other<uint8_t>(block);
}
PYCOMM_SIMD void fold_int8(const Block& block) {
  wraps(block) ? fold_uint8(block) : fold_other<int8_t>(block);
}
PYCOMM_SIMD void fold_uint16(const Block& block) {
  wraps(block) ? fold_wrapping<uint16_t>(block) : fold_other<uint16_t>(block);
}
PYCOMM_SIMD void fold_int16(const Block& block) {
  wraps(block) ? fold_uint16(block) : fold_other<int16_t>(block);
}
PYCOMM_SIMD void fold_uint32(const Block& block) {
  wraps(block) ? fold_wrapping<uint32_t>(block) : fold_other<uint32_t>(block);
}
PYCOMM_SIMD void fold_int32(const Block& block) {
  wraps(block) ? fold_uint32(block) : fold_other<int32_t>(block);
}
PYCOMM_SIMD void fold_uint64(const Block& block) {
  wraps(block) ? fold_wrapping<uint64_t>(block) : fold_other<uint64_t>(block);
}
PYCOMM_SIMD void fold_int64(const Block& block) {
  wraps(block) ? fold_uint64(block) : fold_other<int64_t>(block);
}

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
