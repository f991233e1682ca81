// Nodes: the exchange of ranks whose nodes share memory, each rank at a place of its node. The rank
// at each place has a shard of the bucket, which it exchanges with the ranks at its place in other
// nodes; a node has the role of a rank in the coding. Segment by segment, the ranks of a node make
// the node's exact sum of what they encode, and show each other the payloads of results. All ranks
// of a node do this in one order: first all sums, then the results of their own chunks, then those
// of the others.
#pragma once
#include "collectives/algorithms/node.h"
#include "collectives/coded/channels.h"

namespace pycomm::coded {

class Nodes final : public Channels {
 public:
  Nodes(CollectiveContext& rail, Node& node, const Topology& topology, const Plan& plan,
        const CodedArgs& args);

  void make(int owner, size_t s) override;
  bool has(Shot shot, int rank, size_t s) override;
  Span<const Received> get_places(int owner, size_t s) override;

 private:
  Node& node_;
  const Topology& topology_;
  const Plan& plan_;
  const CodedArgs& args_;
  std::vector<uint8_t> arrivals_;  ///< payloads of the other places
  std::vector<Received> results_;
  std::vector<std::pair<int, size_t>> order_;  ///< of results: owners and segments
  size_t turn_ = 0;
};

}  // namespace pycomm::coded
