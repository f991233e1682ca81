// Passes over float32 matrices whose second moments are products of a row's and a column's factor,
// for all matrices of a bucket or of a step in one call. pycomm/momentum/moment.py has the
// formulas, and pycomm/momentum/scaled.py the same in torch, with the same bits. An optimizer that
// divides by nothing has no factors, and leaves out all that belongs to them.
//
// Sums have one order, whatever the level of SIMD and the number of threads. A row is cut into
// patches of kPatch values. In a patch each of kLanes lanes adds up every kLanes-th value, and then
// half of the lanes is added to the other until one is left; patches are added up in order. Of a
// column, the values of two neighbouring rows are added, these sums in a block of kBlock rows in
// order, and then the blocks in order. What is missing at the end of a patch or block is zero. The
// sum of a vector is that of a row.
#pragma once
#include <vector>

#include "codecs/base/feedback.h"
#include "optim/moments_params.h"

namespace pycomm::moments {

/// Values as residuals are stored.
struct Stored {
  const uint8_t* at = nullptr;  ///< null: there are none
  feedback::Storage storage = feedback::Storage::float32;
};

/// One matrix of `encode`.
struct Encode {
  float* values;         ///< g [rows, columns]
  size_t rows, columns;  ///< with padding
  size_t real;           ///< rows that are not padding
  const float* row;      ///< factors of the denominators; null: they stay as they are
  const float* column;
  Stored momentum;   ///< m of the first rows; that of the others is zero
  size_t known;      ///< rows of it
  float beta, rest;  ///< what m and g are multiplied by
  float* row_sums;   ///< to which `unit` times g's squares are added; null: not wanted
  float* column_sums;
  float unit;
  const float* bounds;   ///< [real]; g's squares count at most `most` times the sum of these
  float most;            ///< 0: any
  const float* signs;    ///< [columns]; null: rows have no projections
  size_t first, stride;  ///< the rows that have one
  float* projections;    ///< to which `by` times g's rows times the signs are added
  float by;
  Stored residual;   ///< e, by which p is coded [rows, columns]
  float* errors;     ///< [2], to which the squares of e and of p + e are added; null: none
  float* copy;       ///< where p is written, too; null: nowhere
  Stored gradient;   ///< g, if it is elsewhere: `values` is only written
  Stored parameter;  ///< x; null: there is no decay
  float decay;       ///< g is added to by this times x
};

/// Replaces gradients g by p = (beta m + rest (g + decay x)) / (row column). A gradient whose
/// squares add up to more than is allowed is scaled down to that after its squares were added.
PYCOMM_API void encode(const std::vector<Encode>& matrices, int threads);

/// A matrix and a factor for each row and column.
struct Matrix {
  float* values;
  size_t rows, columns;
  const float* row;
  const float* column;
};

/// Multiplies each matrix by unit row column, but those without factors. Returns a probe of each,
/// divided by unit.
PYCOMM_API std::vector<Probe> land(const std::vector<Matrix>& matrices, float unit, int threads);

struct Sent {
  Matrix x;              ///< without factors: it is not multiplied
  Stored before, after;  ///< the residual before and after the coding, of one form; or none
  uint8_t* out;
  feedback::Storage storage;  ///< of out
};

/// Stores what was sent of values x whose coding had a residual: (x + before - after) row column.
PYCOMM_API void sent(const std::vector<Sent>& matrices, int threads);

struct Move {
  Matrix x;  ///< parameters, and the reciprocal factors of the denominators, if there are some
  const float* gradient;
  float* momentum;  ///< null: it is not kept
  float lr;
  float keep;   ///< what weight decay leaves
  float limit;  ///< bound of a value that moves; 0: none
  Probe probe;  ///< of g when it was landed
};

/// Takes a step, where g is what it was when it was landed: m <- g;
/// x <- keep x - lr clip(g row column).
PYCOMM_API void move(const std::vector<Move>& matrices, int threads);

/// Sums of second moments by row and column, which have the same total, times `weight`.
struct Sums {
  float* row;
  size_t rows;
  float* column;
  size_t columns;
  float weight;
  Heard by_row;  ///< nulls: not known, all have the whole floor
  Heard by_column;
};

/// Lets sums decay, and adds new ones [rows + columns], the mean of so many steps, with a weight.
PYCOMM_API void fold(const Sums& sums, const float* fresh, float decay, float weight, int steps);

/// Writes factors by row and by column whose products are the roots of the second moments. None is
/// below kFloor times the root mean square of its kind, or its part of that; see floor_share().
PYCOMM_API void factors(const Sums& sums, float* row, float* column);

/// Writes the reciprocals of such factors, after `least` was added to every second moment.
/// The rows are some of `all_rows`.
PYCOMM_API void reciprocal_factors(const Sums& sums, size_t all_rows, float least, float* row,
                                   float* column);

}  // namespace pycomm::moments
