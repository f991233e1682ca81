// Bruck algorithm: an all-gather in ceil(log2 n) rounds for any number of ranks, and the
// collectives that build on it (Bruck, Ho, Kipnis, Upfal, Weathersby 1997, section 3). In round k a
// rank sends all that it has, at most 2^k parts, to the rank 2^k before it and doubles what it has
// from the rank 2^k after it.
//
//   all_gather   ceil(log2 n) messages per rank, the bytes that must move
//   all_reduce   all ranks gather all contributions: the same messages, (n-1) b bytes; folded in
//                rank order, so the bits are those of direct.h
//   barrier      the same without bytes: dissemination (Hensgen, Finkel, Manber 1988)
#pragma once
#include "collectives/algorithms/context.h"
#include "collectives/common/collective.h"

namespace pycomm::bruck {

void all_gather(CollectiveContext& context, const Collective& call);
void all_reduce(CollectiveContext& context, const Collective& call);
void barrier(CollectiveContext& context, const Collective& call);

}  // namespace pycomm::bruck
