// Collectives in which every rank sends to the next one and receives from the one before. The same
// bytes per rank as two-shot, but over two links only, in 2(n-1) steps.
//
// Chunk c starts at rank c+1 and is added to by every rank in turn; rank c adds last and owns the
// result. So a float sum has an order of its own (c+1, c+2, ..., c), the same on every rank and in
// every run, but not rank order as in direct.h; 16- and 8-bit floats are rounded at every step.
#pragma once
#include "collectives/direct.h"

namespace pycomm::ring {

using direct::Fold;

void all_reduce(Exchange& ex, void* data, size_t numel, const Fold& fold);
void reduce_scatter(Exchange& ex, const void* in, void* out, size_t numel, const Fold& fold);
void all_gather(Exchange& ex, const void* in, void* out, size_t bytes);

}  // namespace pycomm::ring
