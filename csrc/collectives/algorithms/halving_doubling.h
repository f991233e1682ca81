// Recursive halving and doubling: reduce-scatter by halving, all-gather by doubling, all-reduce by
// both (Thakur, Rabenseifner, Gropp 2005, sections 4.1 and 4.5). It moves the bytes of two-shot in
// log2 n rounds of one message each, instead of one round of n-1.
//
// Let p be the largest power of two that is not above n. The first 2(n-p) ranks form pairs; in each
// pair, the second rank only hands its input to the first and gets the result from it: one more
// round and b more bytes before and after. The p other ranks halve by powers of two, far partners
// first, so that a rank ends with the part that holds its chunk.
//
// The sum of every element is the same balanced tree over the ranks, so a result depends neither on
// sizes nor on segments; but it is not rank order, and 16- and 8-bit floats are rounded at every
// step.
#pragma once
#include "collectives/algorithms/context.h"
#include "collectives/common/fold.h"
#include "collectives/common/parts.h"

namespace pycomm::halving_doubling {

void all_reduce(CollectiveContext& context, void* data, size_t numel, const Fold& fold);
void reduce_scatter(CollectiveContext& context, const ConstParts& in, void* out, const Fold& fold);
void all_gather(CollectiveContext& context, const void* in, const Parts& out);

}  // namespace pycomm::halving_doubling
