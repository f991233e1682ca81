// The passes of moments.h on a GPU, as launches of the kernels in moments.cu. Numbers that decide
// about a step are on the device (Numbers of moments_params.h), so that nothing waits for it.
#pragma once
#include <array>
#include <vector>

#include "codecs/base/launch.h"
#include "core/types.h"
#include "optim/moments.h"
#include "optim/moments_params.h"

namespace pycomm::moments {

/// Two sides of stored values; nulls: there are none.
struct StoredPair {
  std::array<uint8_t*, 2> at = {};
  uint32_t form = 0;  ///< moments_params.h
};

/// A matrix and what belongs to its moment, all in memory of the device.
struct DeviceMatrix {
  size_t offset;   ///< of its values in the bucket's
  size_t sums_at;  ///< of its sums among those that travel together
  uint32_t rows, columns;
  float* room;  ///< see room_at()
  float* row;   ///< sums of second moments
  float* column;
  float* heard;       ///< see CommitParams
  uint8_t* momentum;  ///< m, in the optimizer's state
  uint32_t momentum_form;
  StoredPair residual;  ///< e
  StoredPair own;       ///< o: what this rank has sent of the momentum
};

/// What a step has of its own for a matrix.
struct Turn {
  const float* signs;  ///< [columns]; null: rows have no projections, and errors are not added up
  uint32_t first, stride;
  double momentum;    ///< coefficient of an exact momentum
  int own;            ///< the side of o that is read; -1: m takes its place
  uint32_t residual;  ///< the side of e that is read
};

/// Where `sent` finds and puts a matrix's values.
struct Sending {
  const uint8_t* before;  ///< the residual before the coding; null: it is where `Turn` says
  uint32_t residual;      ///< as in Turn
  uint32_t own;           ///< the side of o that is written
};

/// The matrices of a bucket, in one launch for each pass.
class PYCOMM_API DeviceMoments {
 public:
  void add(const DeviceMatrix& matrix) { matrices_.push_back(matrix); }
  size_t size() const { return matrices_.size(); }
  /// Returns the floats of scratch memory that `squares` and `encode` need.
  size_t scratch_floats() const;

  /// Adds up the squares of gradients, which are times 1 / unit. A rank's gradient counts at most
  /// `bound` times its root second moment. `ranks` average their momenta.
  void squares(const void* values, DType dtype, const std::vector<Turn>& turns, float* scratch,
               double unit, double bound, uint32_t ranks, const Stream& stream) const;
  /// Replaces these gradients by what is to be coded, and copies it to `copy`, if that is not null.
  /// `divides`: by the factors of the denominators.
  void encode(void* values, DType dtype, const std::vector<Turn>& turns, void* copy, float* scratch,
              bool divides, const float* swapped, const Stream& stream) const;
  /// Stores what was sent of coded values.
  void sent(const void* values, DType dtype, const std::vector<Sending>& sendings,
            const float* swapped, const Stream& stream) const;
  void land(void* values, DType dtype, double unit, bool divides, const Stream& stream) const;

  /// Writes this rank's mean sums.
  void collect(float* sums, const Stream& stream) const;
  struct Commit {
    Use use;
    double beta2, eps;
  };
  /// Takes the total of `sums` over the ranks; null: they were not exchanged.
  void commit(const float* sums, const std::vector<Commit>& how, uint32_t ranks,
              const Stream& stream) const;
  struct Step {
    size_t matrix;  ///< its number
    void* values;
    const void* gradient;
    double lr, keep, limit;
    bool probed;  ///< `land` has made the gradient in this step
  };
  void move(const std::vector<Step>& steps, DType dtype, const Stream& stream) const;

 private:
  std::vector<DeviceMatrix> matrices_;
};

// Passes over matrices without factors, in memory of the device, for an optimizer that divides by
// nothing. Their numbers are the host's.

/// See encode(). Values are float32, forms those of moments_params.h; behind the `errors` there is
/// a zero that counts blocks, and each matrix that has some needs [2, rows, patches] of `scratch`.
PYCOMM_API void encode_on_device(const std::vector<Encode>& matrices, float* scratch,
                                 const Stream& stream);
/// See sent().
PYCOMM_API void sent_on_device(const std::vector<Sent>& matrices, const Stream& stream);
/// See move(). Gradients are float32; parameters and momenta have the dtype.
PYCOMM_API void move_on_device(const std::vector<Move>& matrices, DType dtype,
                               const Stream& stream);

}  // namespace pycomm::moments
