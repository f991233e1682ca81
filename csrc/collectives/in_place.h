// Collectives on buffers that lie in the heaps of their ranks (transports/shared_heap.h): every
// rank reads, and for all_reduce writes, where the others' data lie. Those that only copy also take
// memory that must be read by the kernel. A part of shared*.cpp.
//
// Callers have met, so that all inputs are there; each function ends when all ranks are done with
// everybody's memory. Results have the same bits as those through staging: an element has one
// owner, who folds in rank order.
#pragma once
#include "collectives/rounds.h"

namespace pycomm::shared::in_place {

/// Everybody's `bytes` become the result.
void all_reduce(Window& window, Reducer& reducer, const Places& data, size_t bytes);
/// Of everybody's parts, which lie one after another.
void reduce_scatter(Window& window, Reducer& reducer, const Places& in, size_t part_bytes,
                    void* out);
/// Everybody's `in` has the size of its part of `out`; ours is at `own`.
void all_gather(Window& window, const Places& in, const void* own, const Parts& out);
/// `place` is that of the root's data.
void broadcast(Window& window, int root, uint64_t place, void* data, size_t bytes);

}  // namespace pycomm::shared::in_place
