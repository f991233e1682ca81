// Topology: which ranks share memory. It is equal on all ranks, so that all make the same choices.
#pragma once
#include <vector>

namespace pycomm {

class Topology {
 public:
  Topology() = default;
  /// `first[r]` is the lowest rank of the node of rank r.
  explicit Topology(const std::vector<int>& first);

  int ranks() const { return static_cast<int>(place_.size()); }
  /// Number of nodes. Nodes are in the order of their lowest ranks; the ranks of a node ascend.
  int nodes() const { return static_cast<int>(nodes_.size()); }
  const std::vector<int>& node(int index) const { return nodes_[index]; }
  int node_of(int rank) const { return node_[rank]; }
  /// Place of a rank in its node.
  int place_of(int rank) const { return place_[rank]; }
  /// Number of ranks of the smallest node.
  int narrowest() const;
  /// True if there are several nodes, one of them with several ranks.
  bool has_levels() const { return nodes() > 1 && nodes() < ranks(); }

 private:
  std::vector<std::vector<int>> nodes_;
  std::vector<int> node_;
  std::vector<int> place_;
};

}  // namespace pycomm
