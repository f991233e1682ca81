// Ring collectives: every rank sends to the next one and receives from the previous one. They move
// the same bytes per rank as two-shot, but over two links only, in 2(n-1) steps (Patarasuk, Yuan
// 2009).
//
// Chunk c starts at rank c+1, and every rank in turn adds to it; rank c adds last and owns the
// result. So a float sum has an order of its own (c+1, c+2, ..., c), the same on every rank and in
// every run, but not rank order as in direct.h, and not the same for all sizes of the buffer; 16-
// and 8-bit floats are rounded at every step.
#pragma once
#include "collectives/algorithms/context.h"
#include "collectives/common/collective.h"

namespace pycomm::ring {

void all_reduce(CollectiveContext& context, const Collective& call);
void reduce_scatter(CollectiveContext& context, const Collective& call);
void all_gather(CollectiveContext& context, const Collective& call);

}  // namespace pycomm::ring
