#include "collectives/common/topology.h"

#include <algorithm>

namespace pycomm {

Topology::Topology(const std::vector<int>& first) : node_(first.size()), place_(first.size()) {
  for (size_t r = 0; r < first.size(); r++) {
    const int rank = static_cast<int>(r), lowest = first[r];
    if (lowest == rank) {
      node_[r] = nodes();
      nodes_.emplace_back();
    } else {
      node_[r] = node_[lowest];
    }
    place_[r] = static_cast<int>(nodes_[node_[r]].size());
    nodes_[node_[r]].push_back(rank);
  }
}

int Topology::narrowest() const {
  size_t ranks = nodes_.front().size();
  for (const auto& node : nodes_) ranks = std::min(ranks, node.size());
  return static_cast<int>(ranks);
}

}  // namespace pycomm
