// Loops of reduce(): one fold over a block of elements, for any element type and op.
//
// target_clones cannot sit on a template, so the loops here are always inlined into plain functions
// that carry it (reduce_*.cpp). Everything is element-wise, so `out` may be one of the inputs;
// ivdep tells the vectoriser, which would otherwise take its scalar path for exactly that case.
#pragma once
#include "core/reduce.h"
#include "core/reduce_ops.h"

#define PYCOMM_INLINE inline __attribute__((always_inline))

namespace pycomm::kernels {

/// Elements of a block: few enough that the accumulators stay in the first-level cache.
constexpr size_t kBlock = 1024;
/// Most inputs, so that buffers per input can live on the stack.
constexpr int kMaxInputs = 8192;

/// `inputs[j] + offset` bytes is where input j of this block starts.
struct Block {
  const void* const* inputs = nullptr;
  size_t offset = 0;
  int count = 0;
  void* out = nullptr;
  size_t numel = 0;
  ReduceOp op = ReduceOp::sum;
  double factor = 1.0;  ///< of scale()
  int divisor = 1;
};

template <typename Type, typename Op>
struct KernelFold {
  using Stored = typename Type::Stored;
  using Acc = typename Type::Acc;
  using Scalar = typename Type::Scalar;

  Scalar factor, divisor;

  PYCOMM_INLINE Acc load(Stored x) const { return Op::scale(Type::load(x), factor); }
  PYCOMM_INLINE Stored store(Acc x) const { return Type::store(Op::finish(x, divisor)); }

  static PYCOMM_INLINE const Stored* input(const Block& block, int j) {
    return reinterpret_cast<const Stored*>(static_cast<const char*>(block.inputs[j]) +
                                           block.offset);
  }

  PYCOMM_INLINE void run(const Block& block) const {
    auto* out = static_cast<Stored*>(block.out);
    const size_t n = block.numel;
    const Stored* first = input(block, 0);
    if (block.count == 1) {
#pragma GCC ivdep
      for (size_t i = 0; i < n; i++) out[i] = store(load(first[i]));
      return;
    }
    const Stored* second = input(block, 1);
    if (block.count == 2) {
#pragma GCC ivdep
      for (size_t i = 0; i < n; i++) out[i] = store(Op::fold(load(first[i]), load(second[i])));
      return;
    }
    alignas(64) Acc acc[kBlock];
#pragma GCC ivdep
    for (size_t i = 0; i < n; i++) acc[i] = Op::fold(load(first[i]), load(second[i]));
    for (int j = 2; j < block.count - 1; j++) {
      const Stored* next = input(block, j);
#pragma GCC ivdep
      for (size_t i = 0; i < n; i++) acc[i] = Op::fold(acc[i], load(next[i]));
    }
    const Stored* last = input(block, block.count - 1);
#pragma GCC ivdep
    for (size_t i = 0; i < n; i++) out[i] = store(Op::fold(acc[i], load(last[i])));
  }
};

template <typename Type, typename Op>
PYCOMM_INLINE void fold(const Block& block) {
  using Scalar = typename Type::Scalar;
  KernelFold<Type, Op>{static_cast<Scalar>(block.factor), static_cast<Scalar>(block.divisor)}.run(
      block);
}

/// Folds with the ops of numbers; integers have no premul_sum.
template <typename Type>
PYCOMM_INLINE void fold_numbers(const Block& block) {
  switch (block.op) {
    case ReduceOp::sum:
      return fold<Type, Sum>(block);
    case ReduceOp::avg:
      return fold<Type, Avg>(block);
    case ReduceOp::premul_sum:
      return fold<Type, PremulSum>(block);
    case ReduceOp::prod:
      return fold<Type, Prod>(block);
    case ReduceOp::min:
      return fold<Type, Min>(block);
    case ReduceOp::max:
      return fold<Type, Max>(block);
    default:
      return;
  }
}

/// Folds one block of at most kBlock elements.
using Kernel = void (*)(const Block& block);

// There is one kernel per element type. Each takes the ops that its file lists; reduce() has
// checked.

void fold_float32(const Block& block);
void fold_float64(const Block& block);
void fold_complex64_prod(const Block& block);
void fold_complex128_prod(const Block& block);

void fold_float16(const Block& block);
void fold_bfloat16(const Block& block);
void fold_float8_e4m3(const Block& block);
void fold_float8_e5m2(const Block& block);

void fold_int8(const Block& block);
void fold_int16(const Block& block);
void fold_int32(const Block& block);
void fold_int64(const Block& block);
void fold_uint8(const Block& block);
void fold_uint16(const Block& block);
void fold_uint32(const Block& block);
void fold_uint64(const Block& block);
/// Folds band, bor and bxor of anything, as bytes.
void fold_bits(const Block& block);

}  // namespace pycomm::kernels
