// All-gather in ceil(log2 n) rounds for any number of ranks, and what can be made of it (Bruck, Ho,
// Kipnis, Upfal, Weathersby 1997, section 3). In round k a rank sends all that it has, at most 2^k
// parts, to the rank 2^k before it and doubles what it has from the rank 2^k after it.
//
//   all_gather   ceil(log2 n) messages per rank, the bytes that must move
//   all_reduce   all contributions meet everywhere: the same messages, (n-1) b bytes; folded in
//                rank order, so the bits are those of direct.h
//   barrier      the same without bytes: dissemination (Hensgen, Finkel, Manber 1988)
#pragma once
#include "collectives/exchange.h"
#include "collectives/fold.h"
#include "collectives/parts.h"

namespace pycomm::bruck {

void all_gather(Exchange& ex, const void* in, const Parts& out);
void all_reduce(Exchange& ex, void* data, size_t numel, const Fold& fold);
void barrier(Exchange& ex);

}  // namespace pycomm::bruck
