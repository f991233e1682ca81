#include "collectives/common/topology.h"

#include <algorithm>
#include <string_view>

#include "core/decimal.h"
#include "core/error.h"

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

constexpr char kNodeTopic[] = "node";

void announce_node(const Rendezvous& rendezvous, int lowest) {
  announce(rendezvous, kNodeTopic, std::to_string(lowest));
}

Topology agree_on_topology(const Rendezvous& rendezvous, int lowest) {
  const std::vector<std::string> words =
      all_gather_values(rendezvous, kNodeTopic, all_ranks(rendezvous), std::to_string(lowest));
  std::vector<int> first;
  for (size_t r = 0; r < words.size(); r++) {
    std::string_view rest = words[r];
    double lowest = -1;
    const bool number = take_decimal(rest, lowest) && rest.empty();
    const int rank = static_cast<int>(r);
    const bool known = number && lowest >= 0 && lowest <= rank;
    first.push_back(known ? static_cast<int>(lowest) : rank);
    if (known && first[static_cast<size_t>(first.back())] == first.back()) continue;
    throw Error("rank " + std::to_string(rendezvous.rank) + ": rank " + std::to_string(rank) +
                " says that the first rank of its node is \"" + words[r].substr(0, 40) +
                "\", which is no such rank; install the same pycomm on all ranks");
  }
  return Topology(first);
}

}  // namespace pycomm
