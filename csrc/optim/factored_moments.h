// Operations on float32 matrices whose second moments are products of a row's and a column's
// factor: one pass over the values each. pycomm/reduction/momentum/moment.py has the formulas, and
// pycomm/reduction/momentum/scaled.py the same in torch.
//
// All levels of SIMD and all numbers of threads give the same bits, except that sums over rows are
// added up by thread.
#pragma once
#include "core/types.h"

namespace pycomm::factored_moments {

/// A matrix by rows, without gaps, and a factor for each row and column.
struct Matrix {
  float* values;
  size_t rows, columns;
  const float* row;
  const float* column;
};

/// Sums of squares by row and by column, to which `unit` times the squares are added.
struct Squares {
  float* row = nullptr;
  float* column = nullptr;
  float unit = 1;
};

/// Adds the squares of a matrix to sums by row and column. Its factors are not read.
PYCOMM_API void add_squares(const Matrix& x, const Squares& sums, int threads);

/// New sums by row and column, and the weights of the old and the new ones.
struct NewSums {
  const float* row;
  size_t rows;
  const float* column;
  size_t columns;
  float decay, weight;
};

/// Adds new sums to those that decay.
PYCOMM_API void fold(const NewSums& by, float* row, float* column);

/// Sums of second moments by row and column, which have the same total, times `weight`.
struct Sums {
  const float* row;
  size_t rows;
  const float* column;
  size_t columns;
  float weight;
};

/// Writes factors by row and by column whose products are the roots of the second moments. None is
/// below `floor` times the root mean square of its kind.
PYCOMM_API void factors(const Sums& sums, float floor, float* row, float* column);

/// Writes the reciprocals of such factors, after `least` was added to every second moment.
/// The rows are some of `all_rows`.
PYCOMM_API void reciprocal_factors(const Sums& sums, size_t all_rows, float least, float floor,
                                   float* row, float* column);

struct Divide {
  const float* momentum = nullptr;  // m of the first rows; nullptr: none
  size_t known = 0;                 // rows of it; that of the others is zero
  float beta = 0;
  float unit = 1;   // what the gradient is multiplied by
  Squares squares;  // of the gradient; without row: not wanted
  float most = 0;   // of the sum of these squares; 0: any
};

/// Replaces a gradient g by (beta m + (1 - beta) unit g) / (row column). A gradient whose squares
/// add up to more than `most` is scaled down to it; its squares are written as they are.
PYCOMM_API void divide(const Matrix& g, const Divide& by, int threads);

/// Multiplies by unit row column.
PYCOMM_API void multiply(const Matrix& x, float unit, int threads);

struct Move {
  const float* gradient = nullptr;
  float* momentum = nullptr;
  float lr = 0;
  float keep = 1;   // what weight decay leaves
  float limit = 0;  // bound of a value that moves; 0: none
};

/// Takes a step: m <- g; x <- keep x - lr clip(g row column).
PYCOMM_API void move(const Matrix& x, const Move& by, int threads);

/// Returns the sums of squares of a residual e, in float32 or bfloat16, and of x + e.
struct Errors {
  double left, coded;
};
PYCOMM_API Errors errors(const float* x, const void* residual, bool bf16, size_t numel);

struct Sent {
  const void* before = nullptr;  // the residual before the coding
  const void* after = nullptr;   // and after it
  bool residual_bf16 = false;    // else they are float32
  void* out = nullptr;
  bool out_bf16 = false;
};

/// Writes what was sent of values x whose coding had a residual: (x + before - after) row column.
PYCOMM_API void sent(const Matrix& x, const Sent& by, int threads);

}  // namespace pycomm::factored_moments
