// Contribution of a rank to a reduction: its data, or for a premul_sum its data times its own
// factor.
//
// Factors differ between ranks, so each rank scales its own data before another rank can see the
// first byte. From there on a premul_sum is a sum (core/reduce.h), whatever way the data take. The
// product is rounded to the dtype, in which it travels.
#pragma once
#include <memory>
#include <vector>

#include "collectives/common/collective.h"

namespace pycomm {

/// Contribution to one call. It owns the memory of products, so it outlives the operation that
/// reads them.
class Contribution {
 public:
  /// Returns the call with our contribution as its input. The product of one buffer lies where the
  /// caller wants the result, if he wants one: after an error its contents are undefined anyway.
  Collective of(Collective call, int ranks) {
    if (call.redop != ReduceOp::premul_sum || !call.reduces()) return call;
    const size_t element = size_of(call.dtype);
    if (!call.has_in_parts()) {
      const size_t numel = call.in.numel(0);
      void* product = call.out.data() ? call.out.data() : room(numel * element);
      scale(call.dtype, call.in.data(), product, numel, call.factor);
      call.in = ConstParts(product, numel).of(element);
      return call;
    }
    uint8_t* place = room(call.bytes(ranks));
    const uint8_t* const begin = place;
    for (int r = 0; r < ranks; r++) {
      scale(call.dtype, call.in[r].data, place, call.in.numel(r), call.factor);
      list_.push_back({place, call.in.numel(r)});
      place += call.in.bytes(r);
    }
    call.in = call.in.is_list() ? ConstParts(list_).of(element)
                                : ConstParts(begin, call.in.numel(0)).of(element);
    return call;
  }

 private:
  uint8_t* room(size_t bytes) {
    product_.reset(new uint8_t[bytes]);
    return product_.get();
  }

  std::unique_ptr<uint8_t[]> product_;
  std::vector<ConstPart> list_;
};

}  // namespace pycomm
