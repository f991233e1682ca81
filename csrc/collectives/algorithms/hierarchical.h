// Hierarchical collectives for ranks on several nodes: they use shared memory inside a node and
// channels between nodes, and send each byte over a node's link once where possible. The ranks with
// the same place on all nodes form a rail; every rail carries its own shard, so all ranks of a node
// drive the network.
//
// Sums have one order at every size: rank order inside a node, then the order of nodes. Floats of
// less than 32 bits are rounded once in the node and once more at the end.
//
// Bytes that a node sends, with m nodes of l ranks, n = m l, b bytes in the longest buffer of a
// rank (flat algorithms send l times as many where the rail does not):
//
//   all_reduce       2(m-1)/m b
//   reduce_scatter   (m-1)/m b
//   all_gather       (m-1)/m b
//   broadcast        b from each node but the last, which are a chain
//   reduce           2(m-1)/m b, as all_reduce
#pragma once
#include "collectives/algorithms/context.h"
#include "collectives/common/collective.h"

namespace pycomm::hierarchical {

void all_reduce(CollectiveContext& context, const Collective& call);
void reduce_scatter(CollectiveContext& context, const Collective& call);
void reduce(CollectiveContext& context, const Collective& call);
void all_gather(CollectiveContext& context, const Collective& call);
void broadcast(CollectiveContext& context, const Collective& call);
void barrier(CollectiveContext& context, const Collective& call);

}  // namespace pycomm::hierarchical
