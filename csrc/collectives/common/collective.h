// Collective: one call of a collective, as everything takes it that runs one: channels, memory that
// ranks share, and kernels of GPUs.
#pragma once
#include <string>

#include "collectives/common/parts.h"
#include "core/op.h"
#include "core/reduce.h"

namespace pycomm {

/// Reduction without its buffers: how the contributions of ranks become one value, either at once
/// by its owner or in steps on their way. Those to a premul_sum are scaled already.
struct Fold {
  DType dtype;
  ReduceOp op;
  int divisor = 0;  ///< avg divides by it; 0: by the number of inputs

  void operator()(const void* const* inputs, int count, void* out, size_t numel) const {
    reduce({dtype, op, inputs, count, out, nullptr, numel, divisor});
  }

  // A reduction in steps: between() joins contributions and partial results; last() ends with all
  // `ranks` ranks. Floats of less than 32 bits are rounded at every step.

  Fold between() const { return {dtype, op == ReduceOp::avg ? ReduceOp::sum : op}; }
  /// A divisor that is set is kept: this may be the last step of a larger reduction.
  Fold last(int ranks) const { return {dtype, op, divisor > 0 ? divisor : ranks}; }
};

struct PYCOMM_API Collective {
  Op op = Op::none;
  DType dtype = DType::float32;
  /// What this rank brings: a part for each rank in reduce_scatter, all_to_all and scatter, else
  /// one buffer, which is part 0. It may be `out`, or our part of it, and in an all_reduce and a
  /// broadcast must be. In a scatter the root's counts.
  ConstParts in = {};
  /// What this rank gets: a part of each rank in all_gather, all_to_all and gather, else one
  /// buffer. In a reduce and a gather only the root gets something.
  Parts out = {};
  ReduceOp redop = ReduceOp::sum;
  double factor = 1.0;  ///< of our own contribution to a premul_sum
  int root = -1;
  int divisor = 0;  ///< see Fold

  /// Returns an all-reduce of `data`, and a broadcast of bytes, of parts that know their elements.
  static Collective all_reduce(void* data, size_t numel, const Fold& fold);
  static Collective broadcast(void* data, size_t bytes, int root);

  bool reduces() const {
    return op == Op::all_reduce || op == Op::reduce_scatter || op == Op::reduce;
  }
  bool is_rooted() const {
    return op == Op::broadcast || op == Op::reduce || op == Op::gather || op == Op::scatter;
  }
  /// True if the input, or the output, has a part for each rank.
  bool has_in_parts() const {
    return op == Op::reduce_scatter || op == Op::all_to_all || op == Op::scatter;
  }
  bool has_out_parts() const {
    return op == Op::all_gather || op == Op::all_to_all || op == Op::gather;
  }
  Fold fold() const { return {dtype, redop, divisor}; }
  /// Returns the bytes of the longest buffer of a rank: all parts together.
  size_t bytes(int ranks) const;

  /// Returns the call with parts that know the bytes of their elements. Throws Error if the
  /// arguments of this rank cannot be right.
  Collective checked(int rank, int ranks) const;
  /// Returns what is wrong with the two sizes of our own part, which is copied on this rank; "" if
  /// they are equal. Other ranks do not see it, unless all_parts_are_even().
  std::string own_mismatch(int rank) const;
  /// True if what this rank gets lies where something is that it brings, but for its own part in
  /// place: that would be overwritten before it is sent. For checked() calls.
  bool overwrites(int rank, int ranks) const;
  bool all_parts_are_even(int ranks) const {
    return !is_rooted() && (!has_in_parts() || in.even(ranks)) &&
           (!has_out_parts() || out.even(ranks));
  }
  /// Returns the tag, on which all ranks must agree. Part sizes that differ are hashed into it, and
  /// told to people.
  OpTag tag(int ranks) const;
};

/// The checks of the arguments of one rank: errors name the rank, the op and the problem.
class CallCheck {
 public:
  CallCheck(int rank, int ranks, Op op) : rank_(rank), ranks_(ranks), op_(op) {}

  [[noreturn]] void fail(const std::string& what) const;
  void dtype(DType dtype) const;
  void rank(const char* what, int number) const;
  /// Checks a buffer with elements of the given size: their number may come from anywhere, so their
  /// size in bytes may wrap.
  void buffer(const void* data, size_t numel, size_t element_bytes) const;
  /// Checks that there is one part per rank, with memory.
  template <typename T>
  void parts(const BasicParts<T>& parts, size_t element_bytes) const;

 private:
  int rank_, ranks_;
  Op op_;
};

}  // namespace pycomm
