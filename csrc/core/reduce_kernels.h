// The loops under reduce(): one fold over a block of elements, for any element type and op.
//
// target_clones cannot sit on a template, so the loops here are always inlined into plain functions
// that carry it (reduce_*.cpp). Everything is element-wise, so `out` may be one of the inputs;
// ivdep tells the vectoriser, which would otherwise take its scalar path for exactly that case.
#pragma once
#include <type_traits>

#include "core/floats.h"
#include "core/reduce.h"

#define PYCOMM_INLINE inline __attribute__((always_inline))

namespace pycomm::kernels {

/// One block: small enough that the accumulators stay in the first-level cache.
constexpr size_t kBlock = 1024;
/// So that buffers per input can live on the stack.
constexpr int kMaxInputs = 8192;

/// `inputs[j] + offset` bytes is where input j of this block starts.
struct Block {
  const void* const* inputs;
  size_t offset;
  int count;
  void* out;
  size_t numel;
  ReduceOp op;
  double factor;
  int divisor;
};

// Element types: how one is stored, in what it accumulates (with what `divisor` and `factor` become
// beside it), and how it goes there and back.

template <typename T>
struct Float {
  using Stored = T;
  using Acc = T;
  using Scalar = T;
  static PYCOMM_INLINE Acc load(Stored x) { return x; }
  static PYCOMM_INLINE Stored store(Acc x) { return x; }
};

template <typename Format, typename Code>
struct SmallFloat {
  using Stored = Code;
  using Acc = float;
  using Scalar = float;
  static PYCOMM_INLINE Acc load(Stored x) { return Format::decode(x); }
  static PYCOMM_INLINE Stored store(Acc x) { return static_cast<Stored>(Format::encode(x)); }
};

template <typename T>
struct Integer {
  using Stored = T;
  using Acc = T;
  using Scalar = int;
  static PYCOMM_INLINE Acc load(Stored x) { return x; }
  static PYCOMM_INLINE Stored store(Acc x) { return x; }
};

template <typename T>
struct ComplexValue {
  T re, im;
};

template <typename T>
struct Complex {
  using Stored = ComplexValue<T>;
  using Acc = ComplexValue<T>;
  using Scalar = T;
  static PYCOMM_INLINE Acc load(Stored x) { return x; }
  static PYCOMM_INLINE Stored store(Acc x) { return x; }
};

// Ops: `scale` meets every input first, `fold` joins two, `finish` ends.

/// Integers wrap: as unsigned of at least 32 bits, since int overflow (which two uint16 can reach
/// by promotion) is undefined.
template <typename T, bool kInteger = std::is_integral_v<T>>
struct Wrapping {
  using Type = T;
};
template <typename T>
struct Wrapping<T, true> {
  using Type = std::common_type_t<std::make_unsigned_t<T>, unsigned>;
};

struct Op {
  template <typename Acc, typename Scalar>
  static PYCOMM_INLINE Acc scale(Acc x, Scalar) {
    return x;
  }
  template <typename Acc, typename Scalar>
  static PYCOMM_INLINE Acc finish(Acc x, Scalar) {
    return x;
  }
};

struct Sum : Op {
  template <typename Acc>
  static PYCOMM_INLINE Acc fold(Acc a, Acc b) {
    using W = typename Wrapping<Acc>::Type;
    return static_cast<Acc>(static_cast<W>(a) + static_cast<W>(b));
  }
};

struct Avg : Sum {
  template <typename Acc, typename Scalar>
  static PYCOMM_INLINE Acc finish(Acc x, Scalar divisor) {
    return static_cast<Acc>(x / divisor);
  }
};

struct PremulSum : Sum {
  template <typename Acc, typename Scalar>
  static PYCOMM_INLINE Acc scale(Acc x, Scalar factor) {
    return x * factor;
  }
};

struct Prod : Op {
  template <typename Acc>
  static PYCOMM_INLINE Acc fold(Acc a, Acc b) {
    using W = typename Wrapping<Acc>::Type;
    return static_cast<Acc>(static_cast<W>(a) * static_cast<W>(b));
  }
  template <typename T>
  static PYCOMM_INLINE ComplexValue<T> fold(ComplexValue<T> a, ComplexValue<T> b) {
    return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
  }
};

// A NaN on either side wins; written so that both compile to one compare and one blend.
struct Min : Op {
  template <typename Acc>
  static PYCOMM_INLINE Acc fold(Acc a, Acc b) {
    return (b < a) | (b != b) ? b : a;
  }
};

struct Max : Op {
  template <typename Acc>
  static PYCOMM_INLINE Acc fold(Acc a, Acc b) {
    return (b > a) | (b != b) ? b : a;
  }
};

struct Band : Op {
  template <typename Acc>
  static PYCOMM_INLINE Acc fold(Acc a, Acc b) {
    return a & b;
  }
};

struct Bor : Op {
  template <typename Acc>
  static PYCOMM_INLINE Acc fold(Acc a, Acc b) {
    return a | b;
  }
};

struct Bxor : Op {
  template <typename Acc>
  static PYCOMM_INLINE Acc fold(Acc a, Acc b) {
    return a ^ b;
  }
};

template <typename Type, typename Op>
struct Fold {
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
  Fold<Type, Op>{static_cast<Scalar>(block.factor), static_cast<Scalar>(block.divisor)}.run(block);
}

/// The ops that every float type has.
template <typename Type>
PYCOMM_INLINE void fold_float(const Block& block) {
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

// One kernel per element type. Each takes the ops that its file lists; reduce() has checked.

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
/// Band, bor and bxor of anything, as bytes.
void fold_bits(const Block& block);

}  // namespace pycomm::kernels
