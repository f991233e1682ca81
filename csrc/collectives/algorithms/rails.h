// Rails of the hierarchical algorithms: the ranks on them, and how buffers are cut for them.
#pragma once
#include "collectives/algorithms/node.h"
#include "collectives/common/cost.h"
#include "collectives/common/schedule.h"

namespace pycomm::hierarchical {

/// Bytes of a stage: what goes through shared memory at once while the stage before is in transit
/// between the nodes.
constexpr size_t kStageBytes = size_t{1} << 20;
/// Between far nodes a stage is what a link carries in so many ways to the farthest rank, since the
/// one before it waits for an answer meanwhile.
constexpr double kStageWays = 8;
constexpr size_t kMostStageBytes = size_t{64} << 20;
/// Up to this size there is one message per pair of nodes, sent by the first rank of each.
constexpr size_t kOneMessageBytes = size_t{32} << 10;

inline bool in_one_message(const CollectiveContext& context, size_t bytes) {
  return bytes <= (context.segment_bytes() ? context.segment_bytes() : kOneMessageBytes);
}

inline size_t stage_numel(const CollectiveContext& context, size_t element) {
  size_t bytes = context.segment_bytes() ? 4 * context.segment_bytes() : kStageBytes;
  const Speed& speed = context.speed();
  if (context.segment_bytes() == 0 && speed.way > 0) {
    const auto in_transit = static_cast<size_t>(kStageWays * speed.way / speed.byte);
    bytes = std::clamp(in_transit, kStageBytes, kMostStageBytes);
  }
  return std::max<size_t>(1, bytes / element);
}

/// Returns the ranks at `place` of all nodes, or the first rank of a node that has no such place.
/// `root`, if any, represents its own node.
inline std::vector<int> rail(const Topology& topology, int place, int root = -1) {
  std::vector<int> ranks;
  for (int k = 0; k < topology.nodes(); k++) {
    const bool roots = root >= 0 && topology.node_of(root) == k;
    ranks.push_back(roots ? root : topology.node(k)[place]);
  }
  return ranks;
}

/// Returns the shard of a place: the first `shards` places have one.
inline schedule::Range shard(schedule::Range all, int shards, int place, size_t element) {
  if (place >= shards) return {all.end, all.end};
  const schedule::Range part = schedule::chunk(all.size(), shards, place, schedule::line(element));
  return {all.begin + part.begin, all.begin + part.end};
}

/// Returns the shards of a node's places, as parts.
template <typename T>
std::vector<BasicPart<T>> shards_of(T* data, schedule::Range all, int shards, int places,
                                    size_t element) {
  std::vector<BasicPart<T>> parts;
  for (int p = 0; p < places; p++) {
    const schedule::Range part = shard(all, shards, p, element);
    auto* at = static_cast<typename BasicParts<T>::Byte*>(data) + part.begin * element;
    parts.push_back({at, part.size()});
  }
  return parts;
}

/// Sums the shards of a node's places in place, each at its own rank; calls between(rail, our
/// shard) on the ranks that have one, in the context of their rail; and gathers the shards in the
/// node.
template <typename Between>
void through_nodes(CollectiveContext& context, Node& node, const std::vector<Part>& shards,
                   const Fold& fold, const Between& between) {
  const size_t element = size_of(fold.dtype);
  const Part own = shards[static_cast<size_t>(node.place())];
  std::vector<ConstPart> inputs;
  for (const Part& shard : shards) inputs.push_back({shard.data, shard.numel});
  node.reduce_scatter(ConstParts(inputs).of(element).aligned(), own.data, fold.between());
  if (node.place() < context.topology().narrowest()) {
    const std::vector<int> members = rail(context.topology(), node.place());
    CollectiveContext rail = context.among(members);
    between(rail, own);
  }
  node.all_gather(own.data, Parts(shards).of(element));
}

}  // namespace pycomm::hierarchical
