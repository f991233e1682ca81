// Reductions over every dtype: the owner of an element applies them to the ranks' contributions.
//
// Inputs are folded in the order given, so the result is a function of the values alone; a NaN has
// the bits of one NaN, except that one input that nothing divides is copied as it is. 16- and
// 8-bit floats accumulate in float32 and are rounded once, at the end. `avg` divides the sum once
// (integers: truncating division, as C does). bool: sum and max are "or", prod and min are "and".
//
// Each rank of a `premul_sum` has a factor of its own and scales its contribution before another
// rank sees it. So for reduce() a premul_sum is a sum.
#pragma once
#include "core/types.h"

namespace pycomm {

struct ReduceArgs {
  DType dtype;
  ReduceOp op;
  const void* const* inputs;  ///< `count` pointers, each to `numel` elements
  int count;                  ///< number of ranks, at least 1
  void* out;                  ///< may be one of the inputs
  void* copy = nullptr;       ///< second destination of the same result, or null
  size_t numel = 0;
  int divisor = 0;  ///< avg divides by it; 0: by `count`. For sums that are made in steps
};

/// Throws Error if the op has no meaning for the dtype (band on floats, min on complex, ...).
PYCOMM_API void check_reducible(DType dtype, ReduceOp op);

/// Reduction after lowering: bools and bit ops are bit ops on bytes, all complex ops
/// but prod are ops on twice as many floats.
struct Lowered {
  DType dtype;
  ReduceOp op;
  size_t times;  ///< elements that an element becomes
};
Lowered lower(DType dtype, ReduceOp op);

PYCOMM_API void reduce(const ReduceArgs& args);

/// Computes a rank's contribution to a premul_sum: `in` times its own factor, rounded to the dtype.
/// `out` may be `in`. Throws Error if premul_sum has no meaning for the dtype.
PYCOMM_API void scale(DType dtype, const void* in, void* out, size_t numel, double factor);

/// True if no value is Inf or NaN.
PYCOMM_API bool all_finite(Span<const float> x);

}  // namespace pycomm
