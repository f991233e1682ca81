// Collectives in which every rank talks to every other directly. The owner of an element reduces
// it, in rank order. Costs (n ranks, b bytes per rank, per link and direction):
//
//   one_shot       1 latency     (n-1) b        all_reduce of small buffers
//   two_shot       2 latencies   2(n-1)/n b     all_reduce
//   reduce_scatter, all_gather, all_to_all      1 latency     the bytes that must move
//   broadcast      1 latency     (n-1) b at the root, or 2 latencies and 2 b (scattered)
//   reduce         2 latencies   (n-1)/n b twice at the root
#pragma once
#include "collectives/exchange.h"
#include "collectives/parts.h"

namespace pycomm::direct {

/// Elements to reduce and how.
struct Fold {
  DType dtype;
  ReduceOp op;
  double factor = 1.0;
};

void one_shot_all_reduce(Exchange& ex, void* data, size_t numel, const Fold& fold);
void two_shot_all_reduce(Exchange& ex, void* data, size_t numel, const Fold& fold);
void reduce_scatter(Exchange& ex, const ConstParts& in, void* out, const Fold& fold);
void reduce(Exchange& ex, const void* in, void* out, size_t numel, const Fold& fold, int root);

void all_gather(Exchange& ex, const void* in, const Parts& out);
void all_to_all(Exchange& ex, const ConstParts& in, const Parts& out);
void broadcast(Exchange& ex, void* data, size_t bytes, int root);
void scattered_broadcast(Exchange& ex, void* data, size_t bytes, int root);
void gather(Exchange& ex, const void* in, size_t bytes, const Parts& out, int root);
void scatter(Exchange& ex, const ConstParts& in, void* out, size_t bytes, int root);
void barrier(Exchange& ex);

}  // namespace pycomm::direct
