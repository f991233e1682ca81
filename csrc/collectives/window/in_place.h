// In-place collectives on buffers that lie in the heaps of their ranks (transports/shm/heap.h):
// every rank reads the others' data where they lie, and for all_reduce writes there. Operations
// that only copy also take memory that must be read by the kernel. This is a part of shared*.cpp.
//
// Callers have completed the first stage, so all inputs are there; each function ends when all
// ranks are done with each other's memory. Results have the same bits as those through staging: an
// element has one owner, which folds in rank order.
//
// A rank that is stopped in the middle may continue after the others have given up. What it reads
// then is discarded, since Window::end() throws; what it writes reaches no rank, since a rank that
// gives up reclaims its buffer first (SharedHeap::take_back).
#pragma once
#include "collectives/window/rounds.h"

namespace pycomm::shared::in_place {

/// Reduces the `bytes` of all ranks in place.
void all_reduce(Window& window, Reducer& reducer, const Places& data, size_t bytes);
/// Reduces the parts of all ranks, which lie one after another.
void reduce_scatter(Window& window, Reducer& reducer, const Places& in, size_t part_bytes,
                    void* out);
/// Gathers each rank's `in`, which has the size of its part of `out`; ours is at `own`.
void all_gather(Window& window, const Places& in, const void* own, const Parts& out);
/// Copies the root's data, which lie at `place`.
void broadcast(Window& window, int root, uint64_t place, void* data, size_t bytes);

}  // namespace pycomm::shared::in_place
