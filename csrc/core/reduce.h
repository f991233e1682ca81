// Reductions over every dtype: what the owner of an element does with the ranks' contributions.
//
// Inputs are folded in the order given, so the result is a function of the values alone. 16- and
// 8-bit floats accumulate in float32 and are rounded once, at the end. `avg` divides the sum once
// (integers: truncating division, as C does). bool: sum and max are "or", prod and min are "and".
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
  double factor = 1.0;  ///< premul_sum: every input is multiplied by it first
  int divisor = 0;      ///< avg divides by it; 0: by `count`. For sums that are made in steps
};

/// Throws Error if the op has no meaning for the dtype (band on floats, min on complex, ...).
PYCOMM_API void check_reducible(DType dtype, ReduceOp op);

/// True if every order of the inputs gives the same bits: integers, bools and bit ops. Not the
/// minimum and maximum of floats, which may choose between 0 and -0 and between two NaNs.
PYCOMM_API bool is_order_free(DType dtype, ReduceOp op);

/// What really runs: bools and bit ops are bit ops on bytes, all complex ops but prod are ops on
/// twice as many floats.
struct Lowered {
  DType dtype;
  ReduceOp op;
  size_t times;  ///< elements that an element becomes
};
Lowered lower(DType dtype, ReduceOp op);

PYCOMM_API void reduce(const ReduceArgs& args);

/// True if no value is Inf or NaN.
PYCOMM_API bool all_finite(Span<const float> x);

}  // namespace pycomm
