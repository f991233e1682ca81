// Passes over matrices whose second moments are products of a row's and a column's factor, for all
// matrices of a bucket or of a step in one call; and over matrices without factors, for an
// optimizer that divides by nothing. pycomm/momentum/moment.py has the formulas. There are passes
// on the host, and kernels of a device (device_moments.h), with the same bits.
//
// Sums have one order, whatever the level of SIMD and the number of threads. A row is cut into
// patches of kPatch values. In a patch each of kLanes lanes adds up every kLanes-th value, and then
// half of the lanes is added to the other until one is left; patches are added up in order. Of a
// column, the values of two neighbouring rows are added, these sums in a block of kBlock rows in
// order, and then the blocks in order. What is missing at the end of a patch or block is zero. The
// sum of a vector is that of a row. Shards are added up in order.
#pragma once
#include <array>
#include <vector>

#include "core/op.h"
#include "core/types.h"
#include "optim/moments_params.h"

namespace pycomm::moments {

/// Values in one of the forms of moments_params.h.
struct Stored {
  uint8_t* at = nullptr;  ///< null: there are none
  uint32_t form = 0;
};

/// Returns the form of floats.
inline uint32_t form_of(DType dtype) {
  return dtype == DType::float32 ? 0 : dtype == DType::bfloat16 ? 1 : kFloat16;
}

/// Two sides of stored values; nulls: there are none.
struct StoredPair {
  std::array<uint8_t*, 2> at = {};
  uint32_t form = 0;
};

/// A shard of a matrix and what belongs to its moment. Shards of a matrix follow each other.
struct Matrix {
  size_t offset;   ///< of its values in the bucket's
  size_t sums_at;  ///< of the matrix's sums among those that travel together
  Rows rows;
  float* room;  ///< of the matrix; see room_at()
  float* row;   ///< sums of second moments
  float* column;
  float* heard;         ///< see CommitParams
  Stored momentum;      ///< m of the shard, in the optimizer's state
  StoredPair residual;  ///< e of the shard
  StoredPair own;       ///< o: what this rank has sent of the shard's momentum
};

/// What a step has of its own for a matrix.
struct Turn {
  const float* signs;  ///< [columns]; null: rows have no projections, and errors are not added up
  uint32_t first, stride;  ///< the rows that have one
  double momentum;         ///< coefficient of an exact momentum
  int own;                 ///< the side of o that is read; -1: m takes its place
  uint32_t residual;       ///< the side of e that is read
  bool is_new;             ///< there were no second moments before this step
};

/// What all matrices of a bucket have in common in a step.
struct Pass {
  void* values;
  DType dtype;
  double unit;     ///< of gradients
  float bound;     ///< a gradient counts at most this times its root second moment
  uint32_t ranks;  ///< that average their momenta
  void* copy;      ///< where what is coded is written, too; null: nowhere
  bool divides;    ///< by the factors of the denominators
  float* scratch;  ///< [scratch_floats()] on a device
  const float* swapped;
};

/// Where `sent` finds and puts a shard's values.
struct Sending {
  const uint8_t* before;  ///< the residual before the coding; null: it is where `Turn` says
  uint32_t residual;      ///< as in Turn
  uint32_t own;           ///< the side of o that is written
};

/// How `commit` uses the ranks' sums of a matrix.
struct Commit {
  Use use;
  double beta2, eps;
};

/// A step of a parameter, or of its shard.
struct Step {
  size_t matrix;  ///< its number
  void* values;
  const void* gradient;
  double lr, keep, limit;
  bool probed;  ///< `land` has made the gradient in this step
};

/// The matrices of a bucket or of a step.
class PYCOMM_API Matrices {
 public:
  void add(const Matrix& matrix) { matrices_.push_back(matrix); }
  /// Returns the floats of scratch memory that `squares` and `encode` need on a device.
  size_t scratch_floats() const {
    size_t floats = 0;
    for (const Matrix& m : matrices_) floats += m.rows.scratch_floats();
    return floats;
  }

 protected:
  static CommitParams commit_params(const Matrix& m, const float* sums, const Commit& how,
                                    uint32_t ranks) {
    return {{},       sums == nullptr ? nullptr : sums + m.sums_at,
            m.room,   m.row,
            m.column, m.heard,
            m.rows,   ranks,
            how.use,  how.beta2,
            how.eps};
  }
  /// Returns where a matrix's values are among those of a bucket; null: nowhere.
  static uint8_t* place(const void* values, DType dtype, const Matrix& m) {
    auto* at = static_cast<uint8_t*>(const_cast<void*>(values));
    return at == nullptr ? nullptr : at + m.offset * size_of(dtype);
  }

  std::vector<Matrix> matrices_;
};

/// The passes on the host, whose last argument is the most threads that they take.
class PYCOMM_API HostMoments : public Matrices {
 public:
  /// Adds up the squares of new matrices' gradients.
  void squares(const Pass& pass, const std::vector<Turn>& turns, int threads) const;
  /// Adds up those of the others, and replaces gradients g by p = (beta m + rest g) / d. A shard
  /// of more squares than is allowed is scaled down to that.
  void encode(const Pass& pass, const std::vector<Turn>& turns, int threads) const;
  /// Stores what was sent of coded values x: (x + e before - e after) d.
  void sent(const void* values, DType dtype, const std::vector<Sending>& sendings,
            const float* swapped, int threads) const;
  /// Multiplies coded values by unit and, if they were divided, by d; and looks at them.
  void land(void* values, DType dtype, double unit, bool divides, int threads) const;

  /// Writes this rank's mean sums.
  void collect(float* sums, int threads) const;
  /// Takes the total of `sums` over the ranks; null: they were not exchanged.
  void commit(const float* sums, const std::vector<Commit>& how, uint32_t ranks, int threads) const;
  /// Takes steps, where g is what it was when it was landed: m <- g; x <- keep x - lr clip(g / d).
  void move(const std::vector<Step>& steps, DType dtype, int threads) const;
};

// Passes over matrices without factors.

struct Encode {
  float* values;
  size_t rows, columns;
  Stored gradient, parameter;  ///< g, and x or nothing
  Stored momentum;             ///< m; null: it is left out
  float beta, rest, decay;
  Stored residual;  ///< e, by which p is coded
  float* errors;  ///< [2] and a zero, to which the squares of e and of p + e are added; null: none
  float* copy;    ///< where p is written, too; null: nowhere
};

struct Sent {
  const float* values;
  size_t rows, columns;
  Stored before, after;  ///< the residual before and after the coding, of one form; or none
  Stored out;
};

struct Move {
  Stored values;
  size_t rows, columns;
  const float* gradient;
  uint8_t* momentum;  ///< of the form of the values; null: it is not kept
  float lr;
};

/// Writes p = beta m + rest (g + decay x). `scratch`: [scratch_floats()] on a device, as in Pass.
PYCOMM_API void encode(const std::vector<Encode>& matrices, float* scratch, int threads);
/// Stores what was sent of values x: x + before - after.
PYCOMM_API void sent(const std::vector<Sent>& matrices, int threads);
/// m <- g; x <- x - lr g. All values have the dtype.
PYCOMM_API void move(const std::vector<Move>& matrices, DType dtype, int threads);

}  // namespace pycomm::moments
