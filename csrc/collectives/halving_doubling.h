// Reduce-scatter by recursive halving, all-gather by recursive doubling, all-reduce by both
// (Thakur, Rabenseifner, Gropp 2005, sections 4.1 and 4.5): the bytes of two-shot in log2 n rounds
// of one message each, instead of one round of n-1.
//
// Let p be the largest power of two that is not above n. The first 2(n-p) ranks form pairs; of
// each, the second rank only hands its input to the first and gets the result from it: one round
// and b bytes more at either end. The others halve in p's powers, far partners first, so that the
// part of a rank is where its chunk is.
//
// The sum of every element is the same balanced tree over the ranks, so a result depends neither on
// sizes nor on segments; but it is not rank order, and 16- and 8-bit floats are rounded at every
// step.
#pragma once
#include "collectives/exchange.h"
#include "collectives/fold.h"
#include "collectives/parts.h"

namespace pycomm::halving_doubling {

void all_reduce(Exchange& ex, void* data, size_t numel, const Fold& fold);
void reduce_scatter(Exchange& ex, const ConstParts& in, void* out, const Fold& fold);
void all_gather(Exchange& ex, const void* in, const Parts& out);

}  // namespace pycomm::halving_doubling
