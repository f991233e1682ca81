// Passes over matrices whose second moments are products of a row's and a column's factor, for all
// matrices of a bucket or of a step in one call, on the host or on a device, with the same bits.
// pycomm/momentum/moment.py has the formulas, and moments_passes.h the passes.
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

/// Threads of the host, of which a pass takes this many at most; or a stream of a device.
struct Where {
  int threads = 1;
  Stream stream;

  bool on_device() const { return stream.device == Device::cuda; }
};

/// Values in one of the forms of moments_params.h.
struct Stored {
  uint8_t* at = nullptr;  ///< null: there are none
  uint32_t form = 0;
};

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

/// A bucket, and what all of its matrices have in common in a step.
struct Bucket {
  void* values;
  DType dtype;
  double unit;     ///< of gradients
  float bound;     ///< a gradient counts at most this times its root second moment
  uint32_t ranks;  ///< that average their momenta
  void* copy;      ///< where what is coded is written, too; null: nowhere
  bool divides;    ///< by the factors of the denominators
  float* scratch;  ///< [scratch_floats()]
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

/// The matrices of a bucket or of a step, and the passes over them. On a device all memory is the
/// device's, and a pass is one launch, or two: numbers that decide about a step are there (Numbers
/// of moments_params.h), so that nothing waits for it.
class PYCOMM_API Moments {
 public:
  void add(const Matrix& matrix) { matrices_.push_back(matrix); }
  /// Returns the floats of scratch memory that `code` needs.
  size_t scratch_floats() const {
    size_t floats = 0;
    for (const Matrix& m : matrices_) floats += m.rows.scratch_floats();
    return floats;
  }

  /// Adds up the squares of new matrices' gradients; or, if it encodes, those of the others, and
  /// replaces gradients g by p = (beta m + rest g) / d. A shard of more squares than is allowed is
  /// scaled down to that.
  void code(const Bucket& bucket, const std::vector<Turn>& turns, bool encodes,
            const Where& where) const;
  /// Stores what was sent of coded values x: (x + e before - e after) d kept. `divides`: see
  /// Bucket.
  void sent(const void* values, DType dtype, const std::vector<Sending>& sendings, bool divides,
            const float* swapped, const Where& where) const;
  /// Multiplies coded values by unit and, if they were divided, by d; and looks at them.
  void land(void* values, DType dtype, double unit, bool divides, const Where& where) const;

  /// Writes this rank's mean sums.
  void collect(float* sums, const Where& where) const;
  /// Takes the total of `sums` over the ranks; null: they were not exchanged.
  void commit(const float* sums, const std::vector<Commit>& how, uint32_t ranks,
              const Where& where) const;
  /// Takes steps: m <- kept g, where g is what it was when it was landed, and
  /// x <- keep x - lr clip(g / d) with the same g; or, without d, x <- keep x - lr g as it is now.
  void move(const std::vector<Step>& steps, DType dtype, const Where& where) const;

 private:
  std::vector<Matrix> matrices_;
};

/// A float32 tensor and its state in AdamW, without gaps.
struct Tensor {
  float* values;
  const float* gradient;
  float* momentum;
  float* squares;
  float* steps;  ///< one number on the host, to which a step is added
  size_t numel;
};

struct AdamW {
  double lr, beta1, beta2, eps, weight_decay;
};

/// Takes a step of AdamW (Loshchilov and Hutter 2019, "Decoupled weight decay regularization",
/// algorithm 2) over many tensors, which are not coded:
///
///   m <- m + (1 - beta1) (g - m);  v <- beta2 v + (1 - beta2) g^2
///   x <- (1 - lr weight_decay) x - lr / (1 - beta1^t) m / (sqrt(v / (1 - beta2^t)) + eps)
///
/// It is one call, since models have dozens of small ones, for which calls of single operations
/// cost more than arithmetic. Its bits depend neither on the level of SIMD, nor on threads, nor on
/// a value's place. Torch's can differ in the last one, since its square roots are not rounded
/// correctly on all processors.
PYCOMM_API void step_by_adamw(const std::vector<Tensor>& tensors, const AdamW& settings,
                              const Where& where);

}  // namespace pycomm::moments
