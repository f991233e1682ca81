// Collectives in which every rank sends to the next one and receives from the one before. The same
// bytes per rank as two-shot, but over two links only, in 2(n-1) steps (Patarasuk, Yuan 2009).
//
// Chunk c starts at rank c+1 and is added to by every rank in turn; rank c adds last and owns the
// result. So a float sum has an order of its own (c+1, c+2, ..., c), the same on every rank and in
// every run, but not rank order as in direct.h, and not the same for all sizes of the buffer; 16-
// and 8-bit floats are rounded at every step.
#pragma once
#include "collectives/exchange.h"
#include "collectives/fold.h"
#include "collectives/parts.h"

namespace pycomm::ring {

void all_reduce(Exchange& ex, void* data, size_t numel, const Fold& fold);
void reduce_scatter(Exchange& ex, const ConstParts& in, void* out, const Fold& fold);
void all_gather(Exchange& ex, const void* in, const Parts& out);

}  // namespace pycomm::ring
