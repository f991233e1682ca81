// How the contributions of ranks become one value: at once by its owner, or in steps on their way.
#pragma once
#include <cstring>

#include "core/op.h"
#include "core/reduce.h"

namespace pycomm {

/// A reduction without its buffers.
struct Fold {
  DType dtype;
  ReduceOp op;
  double factor = 1.0;  ///< premul_sum: every input is multiplied by it first
  int divisor = 0;      ///< avg divides by it; 0: by the number of inputs

  void operator()(const void* const* inputs, int count, void* out, size_t numel) const {
    reduce({dtype, op, inputs, count, out, nullptr, numel, factor, divisor});
  }

  // A reduction in steps: contributions are prepared, or meet in first(); partial results meet in
  // between(); in last() all `ranks` ranks are together. Floats of less than 32 bits are rounded at
  // every step.

  void prepare(const void* in, void* out, size_t numel) const {
    if (op == ReduceOp::premul_sum) {
      (*this)(&in, 1, out, numel);
    } else if (in != out && numel > 0) {
      std::memcpy(out, in, numel * size_of(dtype));
    }
  }

  Fold first() const { return {dtype, op == ReduceOp::avg ? ReduceOp::sum : op, factor}; }
  Fold between() const {
    const bool sums = op == ReduceOp::avg || op == ReduceOp::premul_sum;
    return {dtype, sums ? ReduceOp::sum : op};
  }
  /// Keeps a divisor that is set: ours may be the last step of a larger reduction.
  Fold last(int ranks) const {
    const ReduceOp rest = op == ReduceOp::premul_sum ? ReduceOp::sum : op;
    return {dtype, rest, 1.0, divisor > 0 ? divisor : ranks};
  }
};

/// Joins two partial results; `out` may be one of them.
inline void join(const Fold& fold, const void* a, const void* b, void* out, size_t numel) {
  const void* inputs[] = {a, b};
  fold(inputs, 2, out, numel);
}

}  // namespace pycomm
