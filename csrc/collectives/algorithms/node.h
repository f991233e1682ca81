// Node: the ranks that share memory with this one, or those of its site, and one collective's steps
// among them. Ranks are numbered by their place in the node. A rank that is alone on its node only
// copies.
#pragma once
#include <optional>

#include "collectives/algorithms/dispatch.h"

namespace pycomm {

class Node {
 public:
  explicit Node(const CollectiveContext& context);
  /// Ends the call. Without it, after an error, the ranks of the node are out of step.
  void end();

  int size() const { return size_; }
  int place() const { return place_; }
  /// True unless its ranks exchange messages, as those of a site do.
  bool shares_memory() const { return !site_; }

  /// Runs a step. All ranks of the node make the same one with equal sizes. Parts know the bytes of
  /// their elements, and the root is a place.
  void run(const Collective& step);
  void reduce_scatter(const ConstParts& in, void* out, const Fold& fold) {
    run({Op::reduce_scatter, fold.dtype, in, {out, in.numel(place_)}, fold.op});
  }
  void all_gather(const void* in, const Parts& out);

 private:
  Window* window_;                           ///< null: the ranks do not all share memory
  Scratch scratch_;                          ///< of the steps over channels
  std::optional<CollectiveContext> site_{};  ///< the ranks of a site of several hosts
  Deadline deadline_;
  int place_;
  int size_;
};

}  // namespace pycomm
