// Contribution of a rank to a reduction: its data, or for a premul_sum its data times its own
// factor.
//
// Factors differ between ranks, so each rank scales its own data before another rank can see the
// first byte. From there on a premul_sum is a sum (core/reduce.h), whatever way the data take. The
// product is rounded to the dtype, in which it travels.
#pragma once
#include <memory>
#include <vector>

#include "collectives/common/parts.h"
#include "core/reduce.h"

namespace pycomm {

/// Contribution of one call. It owns the memory of products, so it outlives the operation that
/// reads them.
class Contribution {
 public:
  Contribution(DType dtype, ReduceOp op, double factor)
      : dtype_(dtype), scales_(op == ReduceOp::premul_sum), factor_(factor) {}

  /// Scales the data of an operation whose input and output are one. Their contents after an error
  /// are undefined, as after any operation in place; that they may be scaled already then saves a
  /// copy of all data.
  void in_place(void* data, size_t numel) const {
    if (scales_) scale(dtype_, data, data, numel, factor_);
  }

  /// Returns the contribution for `in`, which is the caller's and stays as it is. `out` is where
  /// the caller wants the result, and may be `in`; null: nowhere.
  const void* of(const void* in, size_t numel, void* out) {
    if (!scales_) return in;
    void* product = out ? out : room(numel);
    scale(dtype_, in, product, numel, factor_);
    return product;
  }

  /// Returns the contribution of one part for each of `ranks` ranks. It is valid as long as this
  /// and, if nothing is scaled, as `in`.
  ConstParts of(const ConstParts& in, int ranks) {
    const size_t element = size_of(dtype_);
    const ConstParts sized = in.of(element);
    if (!scales_) return sized;
    uint8_t* place = room(in.total(ranks));
    const uint8_t* const begin = place;
    for (int r = 0; r < ranks; r++) {
      scale(dtype_, sized[r].data, place, sized.numel(r), factor_);
      list_.push_back({place, sized.numel(r)});
      place += sized.bytes(r);
    }
    return in.is_list() ? ConstParts(list_).of(element)
                        : ConstParts(begin, in.numel(0)).of(element);
  }

 private:
  uint8_t* room(size_t numel) {
    product_.reset(new uint8_t[numel * size_of(dtype_)]);
    return product_.get();
  }

  const DType dtype_;
  const bool scales_;
  const double factor_;
  std::unique_ptr<uint8_t[]> product_;
  std::vector<ConstPart> list_;
};

}  // namespace pycomm
