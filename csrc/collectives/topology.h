// Which ranks share memory. Equal on all ranks, so that all choose alike.
#pragma once
#include <vector>

#include "transports/transport.h"

namespace pycomm {

class Topology {
 public:
  Topology() = default;
  /// `first[r]` is the lowest rank of the node of rank r.
  explicit Topology(const std::vector<int>& first);

  int ranks() const { return static_cast<int>(place_.size()); }
  /// Nodes are in the order of their lowest ranks, the ranks of a node ascend.
  int nodes() const { return static_cast<int>(nodes_.size()); }
  const std::vector<int>& node(int index) const { return nodes_[index]; }
  int node_of(int rank) const { return node_[rank]; }
  /// Number of a rank in its node.
  int place_of(int rank) const { return place_[rank]; }
  /// Ranks of the smallest node.
  int narrowest() const;
  /// More than one node, and one of more than one rank.
  bool has_levels() const { return nodes() > 1 && nodes() < ranks(); }

 private:
  std::vector<std::vector<int>> nodes_;
  std::vector<int> node_;
  std::vector<int> place_;
};

/// Every rank names the lowest rank of its node.
Topology agree_on_topology(const Rendezvous& meeting, int lowest);

}  // namespace pycomm
