// What ranks that are far from each other have measured of their links: they tell all others how
// far they are from everyone, in the group's first collective over channels, and how fast they have
// sent, in later ones (ChannelMesh::learns_links()). Each time costs one way to the farthest rank.
#pragma once
#include "collectives/algorithms/context.h"

namespace pycomm {

/// Called by all ranks of the group together. Returns the round trips in microseconds: those
/// between rank i and rank j are at i * ranks + j, the less of what the two have measured.
std::vector<uint32_t> gather_round_trips(CollectiveContext& context, const ChannelMesh& mesh);

/// Called by all ranks of the group together. Returns the bytes per second of each rank's `ours`.
std::vector<double> gather_rates(CollectiveContext& context, double ours);

}  // namespace pycomm
