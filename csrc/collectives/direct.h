// Collectives in which every rank talks to every other directly. The owner of an element reduces
// it, in rank order. Costs (n ranks, b bytes per rank, per link and direction):
//
//   one_shot all_reduce, broadcast, reduce       1 round     (n-1) b
//   two_shot all_reduce, broadcast, reduce       2 rounds    2(n-1)/n b
//   reduce_scatter, all_gather, all_to_all, gather, scatter
//                                                1 round     the bytes that must move
#pragma once
#include "collectives/exchange.h"
#include "collectives/fold.h"
#include "collectives/parts.h"

namespace pycomm::direct {

void one_shot_all_reduce(Exchange& ex, void* data, size_t numel, const Fold& fold);
void two_shot_all_reduce(Exchange& ex, void* data, size_t numel, const Fold& fold);
void reduce_scatter(Exchange& ex, const ConstParts& in, void* out, const Fold& fold);
void one_shot_reduce(Exchange& ex, const void* in, void* out, size_t numel, const Fold& fold,
                     int root);
void two_shot_reduce(Exchange& ex, const void* in, void* out, size_t numel, const Fold& fold,
                     int root);

void all_gather(Exchange& ex, const void* in, const Parts& out);
void all_to_all(Exchange& ex, const ConstParts& in, const Parts& out);
void one_shot_broadcast(Exchange& ex, void* data, size_t bytes, int root);
void two_shot_broadcast(Exchange& ex, void* data, size_t bytes, int root);
void gather(Exchange& ex, const void* in, size_t bytes, const Parts& out, int root);
void scatter(Exchange& ex, const ConstParts& in, void* out, size_t bytes, int root);
void barrier(Exchange& ex);

}  // namespace pycomm::direct
