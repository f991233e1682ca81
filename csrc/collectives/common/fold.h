// Fold: how the contributions of ranks become one value, either at once by its owner or in steps on
// their way.
#pragma once
#include "core/op.h"
#include "core/reduce.h"

namespace pycomm {

/// Reduction without its buffers. Contributions to a premul_sum are scaled already
/// (contribution.h).
struct Fold {
  DType dtype;
  ReduceOp op;
  int divisor = 0;  ///< avg divides by it; 0: by the number of inputs

  void operator()(const void* const* inputs, int count, void* out, size_t numel) const {
    reduce({dtype, op, inputs, count, out, nullptr, numel, divisor});
  }

  // A reduction in steps: between() joins contributions and partial results; last() ends with all
  // `ranks` ranks. Floats of less than 32 bits are rounded at every step.

  Fold between() const { return {dtype, op == ReduceOp::avg ? ReduceOp::sum : op}; }
  /// A divisor that is set is kept: this may be the last step of a larger reduction.
  Fold last(int ranks) const { return {dtype, op, divisor > 0 ? divisor : ranks}; }
};

/// Joins two partial results; `out` may be one of them.
inline void join(const Fold& fold, const void* a, const void* b, void* out, size_t numel) {
  const void* inputs[] = {a, b};
  fold(inputs, 2, out, numel);
}

}  // namespace pycomm
