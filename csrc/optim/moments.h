// Passes over matrices whose second moments are products of a row's and a column's factor, for all
// matrices of a bucket or of a step in one call. pycomm/momentum/moment.py has the formulas. There
// are passes on the host, and kernels of a device (device_moments.h), with the same bits.
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
  float kept;              ///< what is kept of it, m and o, is this times a mean of gradients
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
  float kept;             ///< as in Turn
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
  float kept;    ///< as in Turn
  bool divides;  ///< by d
  bool probed;   ///< `land` has made the gradient in this step
};

/// Returns where a matrix's values are among those of a bucket; null: nowhere.
inline uint8_t* place(const void* values, DType dtype, const Matrix& m) {
  auto* at = static_cast<uint8_t*>(const_cast<void*>(values));
  return at == nullptr ? nullptr : at + m.offset * size_of(dtype);
}

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
  static CollectParams collect_params(const Matrix& m, float* sums) {
    return {{}, m.room, sums + m.sums_at, m.rows};
  }
  static CommitParams commit_params(const Matrix& m, const float* sums, const Commit& how,
                                    uint32_t ranks) {
    return {{},         sums == nullptr ? nullptr : sums + m.sums_at,
            m.room,     m.row,
            m.column,   m.heard,
            m.rows.all, m.rows.columns,
            ranks,      how.use,
            how.beta2,  how.eps};
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
  /// Stores what was sent of coded values x: (x + e before - e after) d kept. `divides`: see Pass.
  void sent(const void* values, DType dtype, const std::vector<Sending>& sendings, bool divides,
            const float* swapped, int threads) const;
  /// Multiplies coded values by unit and, if they were divided, by d; and looks at them.
  void land(void* values, DType dtype, double unit, bool divides, int threads) const;

  /// Writes this rank's mean sums.
  void collect(float* sums, int threads) const;
  /// Takes the total of `sums` over the ranks; null: they were not exchanged.
  void commit(const float* sums, const std::vector<Commit>& how, uint32_t ranks, int threads) const;
  /// Takes steps: m <- kept g, where g is what it was when it was landed, and
  /// x <- keep x - lr clip(g / d) with the same g; or, without d, x <- keep x - lr g as it is now.
  void move(const std::vector<Step>& steps, DType dtype, int threads) const;
};

}  // namespace pycomm::moments
