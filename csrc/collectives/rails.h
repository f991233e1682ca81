// What the hierarchical algorithms share: who is on our rail, and how buffers are cut for it.
#pragma once
#include "collectives/node.h"
#include "collectives/schedule.h"
#include "collectives/select.h"

namespace pycomm::hierarchical {

/// Bytes of a stage: what goes through shared memory at once while the stage before is on its way
/// between the nodes.
constexpr size_t kStageBytes = size_t{1} << 20;
/// Up to here one message per pair of nodes: the first rank of each speaks for it.
constexpr size_t kOneMessageBytes = size_t{32} << 10;

inline bool in_one_message(const Exchange& ex, size_t bytes) {
  return bytes <= (ex.segment_bytes() ? ex.segment_bytes() : kOneMessageBytes);
}

inline size_t stage_numel(const Exchange& ex, size_t element) {
  const size_t bytes = ex.segment_bytes() ? 4 * ex.segment_bytes() : kStageBytes;
  return std::max<size_t>(1, bytes / element);
}

/// The ranks at `place` of all nodes; of a node that has no such place, the first. `root`, if any,
/// speaks for its own node.
inline std::vector<int> rail(const Topology& topology, int place, int root = -1) {
  std::vector<int> ranks;
  for (int k = 0; k < topology.nodes(); k++) {
    const bool roots = root >= 0 && topology.node_of(root) == k;
    ranks.push_back(roots ? root : topology.node(k)[place]);
  }
  return ranks;
}

/// Shard of a place: the first `shards` places have one.
inline schedule::Range shard(schedule::Range all, int shards, int place, size_t element) {
  if (place >= shards) return {all.end, all.end};
  const schedule::Range part = schedule::chunk(all.size(), shards, place, schedule::line(element));
  return {all.begin + part.begin, all.begin + part.end};
}

/// The shards of a node's places, as parts.
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

}  // namespace pycomm::hierarchical
