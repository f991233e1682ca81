// BlockReducer: how a block of a kernel folds the contributions of ranks, with the arithmetic of
// the CPU.
#pragma once
#include "collectives/device/barrier.h"
#include "core/reduce_ops.h"

namespace pycomm::device {

/// Combines sum, premul_sum and avg, since each op is code of its own: a factor of 1 changes
/// nothing, and BlockReducer finishes averages only.
struct ScaledSum : kernels::PremulSum {
  template <typename Acc, typename Scalar>
  static PYCOMM_HD Acc finish(Acc x, Scalar divisor) {
    return kernels::Avg::finish(x, divisor);
  }
};

// Ops of a type, and whether premul_sum is one; visit(op, f) calls f(Op{}).

template <typename Sum, bool scales>
struct NumberOps {
  static constexpr bool kScales = scales;
  template <typename F>
  PYCOMM_KERNEL static void visit(ReduceOp op, const F& f) {
    switch (op) {
      case ReduceOp::prod:
        return f(kernels::Prod{});
      case ReduceOp::min:
        return f(kernels::Min{});
      case ReduceOp::max:
        return f(kernels::Max{});
      default:
        return f(Sum{});
    }
  }
};

struct ProductOnly {
  static constexpr bool kScales = false;
  template <typename F>
  PYCOMM_KERNEL static void visit(ReduceOp, const F& f) {
    f(kernels::Prod{});
  }
};

struct BitOps {
  static constexpr bool kScales = false;
  template <typename F>
  PYCOMM_KERNEL static void visit(ReduceOp op, const F& f) {
    switch (op) {
      case ReduceOp::band:
        return f(kernels::Band{});
      case ReduceOp::bor:
        return f(kernels::Bor{});
      default:
        return f(kernels::Bxor{});
    }
  }
};

/// 16 bytes of elements.
template <typename Stored>
struct alignas(16) Pack {
  static constexpr int kCount = 16 / sizeof(Stored);
  Stored v[kCount];
};

/// Folds inputs in order.
template <typename Type, typename Op>
struct BlockReducer {
  using Stored = typename Type::Stored;
  using Acc = typename Type::Acc;
  using Scalar = typename Type::Scalar;
  static constexpr int kCount = Pack<Stored>::kCount;
  /// Packs that a thread has in flight at once: as many as fit in its registers.
  static constexpr int kDepth = sizeof(Stored) >= 4 ? 4 : sizeof(Stored) == 2 ? 2 : 1;

  Scalar factor;  ///< of input 0: of our own contribution, which is rounded to the type; else 1
  Scalar divisor;
  bool finishes;

  PYCOMM_KERNEL Acc first(Stored x) const {
    if (factor == Scalar{1}) return Type::load(x);
    return Type::load(Type::store(Op::scale(Type::load(x), factor)));
  }
  PYCOMM_KERNEL Stored last(Acc x) const {
    return Type::store(finishes ? Op::finish(x, divisor) : x);
  }

  /// Computes to[i] = fold of the `count` inputs at i. input(j) is where input j starts.
  template <typename Machine, typename Input>
  PYCOMM_KERNEL void fold(const Machine& m, const Input& input, int count, uint8_t* to,
                          size_t bytes) const {
    const size_t step = m.threads();
    bool wide = aligned(to);
    for (int j = 0; j < count; j++) wide = wide && aligned(input(j));
    const size_t n = wide ? bytes / 16 : 0;
    for (size_t i = m.thread(); i < n; i += kDepth * step) {
      fold_packs(input, count, to, i, n, step);
    }
    for (size_t k = n * kCount + m.thread(); k < bytes / sizeof(Stored); k += step) {
      const auto at = [&](int j) { return reinterpret_cast<const Stored*>(input(j))[k]; };
      Acc acc = first(at(0));
      PYCOMM_NO_UNROLL
      for (int j = 1; j < count; j++) acc = Op::fold(acc, Type::load(at(j)));
      reinterpret_cast<Stored*>(to)[k] = last(acc);
    }
  }

 private:
  /// Folds packs i, i + step, ... that are below n.
  template <typename Input>
  PYCOMM_KERNEL void fold_packs(const Input& input, int count, uint8_t* to, size_t i, size_t n,
                                size_t step) const {
    Acc acc[kDepth][kCount];
    Pack<Stored> x[kDepth];
    const auto load = [&](int j) {
      PYCOMM_UNROLL
      for (int p = 0; p < kDepth; p++) {
        const size_t at = i + p * step < n ? i + p * step : i;
        x[p] = reinterpret_cast<const Pack<Stored>*>(input(j))[at];
      }
    };
    load(0);
    PYCOMM_UNROLL
    for (int p = 0; p < kDepth; p++) {
      PYCOMM_UNROLL
      for (int k = 0; k < kCount; k++) acc[p][k] = first(x[p].v[k]);
    }
    PYCOMM_NO_UNROLL
    for (int j = 1; j < count; j++) {
      load(j);
      PYCOMM_UNROLL
      for (int p = 0; p < kDepth; p++) {
        PYCOMM_UNROLL
        for (int k = 0; k < kCount; k++) acc[p][k] = Op::fold(acc[p][k], Type::load(x[p].v[k]));
      }
    }
    PYCOMM_UNROLL
    for (int p = 0; p < kDepth; p++) {
      Pack<Stored> result;
      PYCOMM_UNROLL
      for (int k = 0; k < kCount; k++) result.v[k] = last(acc[p][k]);
      if (i + p * step < n) reinterpret_cast<Pack<Stored>*>(to)[i + p * step] = result;
    }
  }
};

}  // namespace pycomm::device
