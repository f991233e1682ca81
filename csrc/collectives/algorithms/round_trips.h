// How far ranks are from each other: in the group's first collective over channels each tells all
// others what it has measured (ChannelMesh::lacks_round_trips()), which costs one way to the
// farthest rank.
#pragma once
#include "collectives/algorithms/context.h"

namespace pycomm {

/// Called by all ranks of the group together. Returns the round trips in microseconds: those
/// between rank i and rank j are at i * ranks + j, the less of what the two have measured.
std::vector<uint32_t> gather_round_trips(CollectiveContext& context, const ChannelMesh& mesh);

}  // namespace pycomm
