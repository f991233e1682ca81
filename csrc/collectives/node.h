// The ranks that share memory with us, and one collective's steps among them. Ranks are numbered by
// their place in the node. A rank that is alone there has nothing to do but copy.
#pragma once
#include "collectives/exchange.h"
#include "collectives/fold.h"
#include "collectives/parts.h"

namespace pycomm {

class Node {
 public:
  explicit Node(const Exchange& ex);
  /// The call is done. Without it, after an error, the ranks of the node are out of step.
  void end();

  int size() const { return size_; }
  int place() const { return place_; }

  // All ranks of the node call the same with equal sizes. Parts know the bytes of their elements.

  void all_reduce(void* data, size_t numel, const Fold& fold);
  void reduce_scatter(const ConstParts& in, void* out, const Fold& fold);
  void all_gather(const void* in, const Parts& out);
  void broadcast(void* data, size_t bytes, int place);
  void barrier();

 private:
  /// What a step works on, in the words of a call.
  static OpTag step(size_t numel, DType dtype, ReduceOp redop = ReduceOp::sum);

  Window* window_;
  Deadline deadline_;
  int place_;
  int size_;
};

}  // namespace pycomm
