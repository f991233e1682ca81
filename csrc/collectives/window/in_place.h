// In-place collectives: every rank reads the others' data where they lie, and each byte is copied
// once. The data are in the heaps of their ranks (transports/shm/heap.h), where an all_reduce also
// writes, or in ordinary memory of other processes, which the kernel reads for us
// (transports/shm/cma.h) where that beats the two copies through staging. This is a part of
// shared.cpp.
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

// Sizes from which reading beats staging, measured on two cores with both ways in turn (float32, 64
// KiB to 64 MiB, time of staging divided by that of reading). Two ranks: 0.4 to 1.04 below, 1.01 to
// 2.5 from here on; an all_reduce, which reads what the other core has just written, 0.63 to 0.68
// up to 1 MiB, 0.84 to 0.89 at 2 MiB, 1.18 to 1.30 at 4 MiB. Three and four ranks, more than cores:
// from run to run 0.67 to 1.8, so they stay in staging but for two: reduce_scatter (1.16 to 1.9
// from here on) and parts (all_to_all 1.0 to 1.4; scatter and gather mostly above 1, gather of
// three ranks 0.8 to 1.1).
constexpr size_t kNever = SIZE_MAX;
constexpr size_t all_reduce_from(int ranks) { return ranks == 2 ? size_t{3} << 20 : kNever; }
/// Returns the bytes of all parts from which a reduce_scatter reads.
constexpr size_t reduce_scatter_from(int ranks) { return size_t{ranks == 2 ? 512u : 16384u} << 10; }
/// Returns the bytes of a part from which an all_gather reads.
constexpr size_t all_gather_from(int ranks) { return ranks == 2 ? size_t{256} << 10 : kNever; }
constexpr size_t broadcast_from(int ranks) { return ranks == 2 ? size_t{512} << 10 : kNever; }
/// Bytes of a part of all_to_all, gather and scatter, with any number of ranks.
constexpr size_t kPartFrom = size_t{256} << 10;

/// Reduces the `bytes` of all ranks in place; ours are at `own`.
void all_reduce(Window& window, Reducer& reducer, const Places& data, void* own, size_t bytes);
/// Reduces our part of all ranks' data, which lies at `offset` there; of our own data it is `own`.
void reduce_scatter(Window& window, Reducer& reducer, const Places& in, Span<const uint8_t> own,
                    size_t offset, void* out);
/// Gathers each rank's `in`, which has the size of its part of `out`; ours is at `own`.
void all_gather(Window& window, const Places& in, const void* own, const Parts& out);
/// Copies the root's data, which lie at `place`.
void broadcast(Window& window, int root, uint64_t place, void* data, size_t bytes);

}  // namespace pycomm::shared::in_place
