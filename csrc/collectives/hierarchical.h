// Collectives of ranks that live on several nodes: shared memory inside a node, channels between
// nodes, and each byte over a node's link once where that can be. The ranks of equal place on all
// nodes form a rail; every rail carries its own shard, so all ranks of a node drive the network.
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
//   reduce           at most 2(m-1)/m b
#pragma once
#include "collectives/exchange.h"
#include "collectives/fold.h"
#include "collectives/parts.h"

namespace pycomm::hierarchical {

void all_reduce(Exchange& ex, void* data, size_t numel, const Fold& fold);
void reduce_scatter(Exchange& ex, const ConstParts& in, void* out, const Fold& fold);
void reduce(Exchange& ex, const void* in, void* out, size_t numel, const Fold& fold, int root);
void all_gather(Exchange& ex, const void* in, const Parts& out);
void broadcast(Exchange& ex, void* data, size_t bytes, int root);
void barrier(Exchange& ex);

}  // namespace pycomm::hierarchical
