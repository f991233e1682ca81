// Direct collectives: every rank talks to every other directly. The owner of an element reduces it,
// in rank order. Costs (n ranks, b bytes per rank, per link and direction):
//
//   one_shot all_reduce, broadcast, reduce       1 round     (n-1) b
//   two_shot all_reduce, broadcast, reduce       2 rounds    2(n-1)/n b
//   reduce_scatter, all_gather, all_to_all, gather, scatter
//                                                1 round     the bytes that must move
#pragma once
#include "collectives/algorithms/context.h"
#include "collectives/common/collective.h"

namespace pycomm::direct {

/// All_reduce and reduce.
void one_shot_reduce(CollectiveContext& context, const Collective& call);
void two_shot_reduce(CollectiveContext& context, const Collective& call);
void reduce_scatter(CollectiveContext& context, const Collective& call);

/// All ops that only move bytes; a broadcast in one shot.
void exchange(CollectiveContext& context, const Collective& call);
void two_shot_broadcast(CollectiveContext& context, const Collective& call);

}  // namespace pycomm::direct
