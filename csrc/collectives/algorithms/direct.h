// Direct collectives: every rank talks to every other directly. The owner of an element reduces it,
// in rank order. Costs (n ranks, b bytes per rank, per link and direction):
//
//   one_shot all_reduce, broadcast, reduce       1 round     (n-1) b
//   two_shot all_reduce, broadcast, reduce       2 rounds    2(n-1)/n b
//   reduce_scatter, all_gather, all_to_all, gather, scatter
//                                                1 round     the bytes that must move
#pragma once
#include "collectives/algorithms/context.h"
#include "collectives/common/fold.h"
#include "collectives/common/parts.h"

namespace pycomm::direct {

void one_shot_all_reduce(CollectiveContext& context, void* data, size_t numel, const Fold& fold);
void two_shot_all_reduce(CollectiveContext& context, void* data, size_t numel, const Fold& fold);
void reduce_scatter(CollectiveContext& context, const ConstParts& in, void* out, const Fold& fold);
void one_shot_reduce(CollectiveContext& context, const void* in, void* out, size_t numel,
                     const Fold& fold, int root);
void two_shot_reduce(CollectiveContext& context, const void* in, void* out, size_t numel,
                     const Fold& fold, int root);

void all_gather(CollectiveContext& context, const void* in, const Parts& out);
void all_to_all(CollectiveContext& context, const ConstParts& in, const Parts& out);
void one_shot_broadcast(CollectiveContext& context, void* data, size_t bytes, int root);
void two_shot_broadcast(CollectiveContext& context, void* data, size_t bytes, int root);
void gather(CollectiveContext& context, const void* in, size_t bytes, const Parts& out, int root);
void scatter(CollectiveContext& context, const ConstParts& in, void* out, size_t bytes, int root);
void barrier(CollectiveContext& context);

}  // namespace pycomm::direct
