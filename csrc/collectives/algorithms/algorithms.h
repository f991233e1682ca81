// The algorithms of collectives over channels; algorithms/dispatch.cpp has their costs. Parts know
// the bytes of their elements.
#pragma once
#include "collectives/algorithms/context.h"
#include "collectives/common/collective.h"

namespace pycomm {

/// Every rank talks to every other directly. The owner of an element reduces it, in rank order.
/// Costs (n ranks, b bytes per rank, per link and direction):
///
///   one_shot all_reduce, broadcast, reduce       1 round     (n-1) b
///   two_shot all_reduce, broadcast, reduce       2 rounds    2(n-1)/n b
///   reduce_scatter, all_gather, all_to_all, gather, scatter
///                                                1 round     the bytes that must move
namespace direct {

/// All_reduce and reduce.
void one_shot_reduce(CollectiveContext& context, const Collective& call);
void two_shot_reduce(CollectiveContext& context, const Collective& call);
void reduce_scatter(CollectiveContext& context, const Collective& call);
/// All ops that only move bytes; a broadcast in one shot.
void exchange(CollectiveContext& context, const Collective& call);
void two_shot_broadcast(CollectiveContext& context, const Collective& call);

}  // namespace direct

/// An all-gather in ceil(log2 n) rounds for any number of ranks, and the collectives that build on
/// it (Bruck, Ho, Kipnis, Upfal, Weathersby 1997, section 3). In round k a rank sends all that it
/// has, at most 2^k parts, to the rank 2^k before it and doubles what it has from the rank 2^k
/// after it.
///
///   all_gather   ceil(log2 n) messages per rank, the bytes that must move
///   all_reduce   all ranks gather all contributions: the same messages, (n-1) b bytes; folded in
///                rank order, so the bits are those of direct
///   barrier      the same without bytes: dissemination (Hensgen, Finkel, Manber 1988)
namespace bruck {

void all_gather(CollectiveContext& context, const Collective& call);
void all_reduce(CollectiveContext& context, const Collective& call);
void barrier(CollectiveContext& context, const Collective& call);

}  // namespace bruck

/// Every rank sends to the next one and receives from the previous one. That moves the same bytes
/// per rank as two-shot, but over two links only, in 2(n-1) steps (Patarasuk, Yuan 2009).
///
/// Chunk c starts at rank c+1, and every rank in turn adds to it; rank c adds last and owns the
/// result. So a float sum has an order of its own (c+1, c+2, ..., c), the same on every rank and in
/// every run, but not rank order as in direct, and not the same for all sizes of the buffer; 16-
/// and 8-bit floats are rounded at every step.
namespace ring {

void all_reduce(CollectiveContext& context, const Collective& call);
void reduce_scatter(CollectiveContext& context, const Collective& call);
void all_gather(CollectiveContext& context, const Collective& call);

}  // namespace ring

/// A broadcast over a binomial tree: ceil(log2 n) rounds, and no more messages than that at the
/// root, instead of n-1 (Thakur, Rabenseifner, Gropp 2005, section 4). The root's link carries
/// ceil(log2 n) b.
namespace tree {

void broadcast(CollectiveContext& context, const Collective& call);

}  // namespace tree

/// For ranks on several nodes: they use shared memory inside a node and
/// channels between nodes, and send each byte over a node's link once where possible. The ranks
/// with the same place on all nodes form a rail; every rail carries its own shard, so all ranks of
/// a node drive the network.
///
/// Sums have one order at every size: rank order inside a node, then the order of nodes. Floats of
/// less than 32 bits are rounded once in the node and once more at the end.
///
/// Bytes that a node sends, with m nodes of l ranks, n = m l, b bytes in the longest buffer of a
/// rank (flat algorithms send l times as many where the rail does not):
///
///   all_reduce       2(m-1)/m b
///   reduce_scatter   (m-1)/m b
///   all_gather       (m-1)/m b
///   broadcast        b from each node but the last, which are a chain
///   reduce           2(m-1)/m b, as all_reduce
namespace hierarchical {

void all_reduce(CollectiveContext& context, const Collective& call);
void reduce_scatter(CollectiveContext& context, const Collective& call);
void reduce(CollectiveContext& context, const Collective& call);
void all_gather(CollectiveContext& context, const Collective& call);
void broadcast(CollectiveContext& context, const Collective& call);
void barrier(CollectiveContext& context, const Collective& call);

}  // namespace hierarchical

}  // namespace pycomm
