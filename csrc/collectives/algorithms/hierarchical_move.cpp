// Hierarchical collectives that only move bytes.
#include "collectives/algorithms/dispatch.h"
#include "collectives/algorithms/hierarchical.h"
#include "collectives/algorithms/rails.h"

namespace pycomm::hierarchical {
namespace {

using schedule::Range;

// Returns the bytes of segment t of a part.
Span<uint8_t> segment(const Span<uint8_t>& part, size_t bytes, size_t t) {
  const size_t begin = std::min(part.size, t * bytes);
  return part.sub(begin, std::min(bytes, part.size - begin));
}

}  // namespace

// Every part goes once to every other node, to the rank with the same place there; then the ranks
// of a node share what they have received.
void all_gather(CollectiveContext& context, const void* in, const Parts& out) {
  Node node(context);
  const Topology& topology = context.topology();
  const int me = context.rank(), home = topology.node_of(me), nodes = topology.nodes();
  const size_t each = stage_numel(context, 1);
  const auto place = static_cast<size_t>(node.place()), size = static_cast<size_t>(node.size());
  size_t longest = 0;
  for (int r = 0; r < context.size(); r++) longest = std::max(longest, out.bytes(r));
  const size_t stages = schedule::divide_up(longest, each);

  const auto* ours = static_cast<const uint8_t*>(in);
  std::vector<uint64_t> tickets(stages * static_cast<size_t>(context.size()));
  for (size_t t = 0; t < stages; t++) {
    for (int i = 1; i < nodes; i++) {
      const std::vector<int>& ranks = topology.node((home + i) % nodes);
      const Span<uint8_t> own = segment(out[me], each, t);
      context.send(ranks[place % ranks.size()], ours + (own.data - out[me].data), own.size);
      for (size_t index = place; index < ranks.size(); index += size) {
        const Span<uint8_t> theirs = segment(out[ranks[index]], each, t);
        tickets[t * static_cast<size_t>(context.size()) + static_cast<size_t>(ranks[index])] =
            context.recv(ranks[index], theirs.data, theirs.size);
      }
    }
  }
  context.progress();

  // Hand h of a node: its ranks at places h * size and up, one for each rank of our node.
  const auto show = [&](size_t t, int k, size_t hand) {
    const std::vector<int>& ranks = topology.node(k);
    std::vector<Part> list;
    const void* own = nullptr;
    for (size_t p = 0; p < size; p++) {
      const size_t index = hand * size + p;
      Span<uint8_t> part;
      if (index < ranks.size()) part = segment(out[ranks[index]], each, t);
      list.push_back({part.data, part.size});
      if (p == place) own = part.data;
      if (p == place && k == home) own = ours + (part.data - out[me].data);
    }
    node.all_gather(own, list);
  };
  for (size_t t = 0; t < stages; t++) {
    show(t, home, 0);
    for (int i = 1; i < nodes; i++) {
      const int k = (home + i) % nodes;
      const std::vector<int>& ranks = topology.node(k);
      for (size_t hand = 0; hand * size < ranks.size(); hand++) {
        const size_t index = hand * size + place;
        if (index < ranks.size()) {
          context.wait(
              ranks[index],
              tickets[t * static_cast<size_t>(context.size()) + static_cast<size_t>(ranks[index])]);
        }
        show(t, k, hand);
      }
    }
  }
  context.wait_all();
  node.end();
}

// A small buffer goes between the first ranks of the nodes; the root takes that role for its own
// node. For a large one, the root's node shares the buffer among its ranks; each sends its shard
// along the rail, where every node passes it on to the next as it arrives and shares it among its
// ranks.
void broadcast(CollectiveContext& context, void* data, size_t bytes, int root) {
  Node node(context);
  const Topology& topology = context.topology();
  const int me = context.rank(), home = topology.node_of(root);
  const bool at_home = topology.node_of(me) == home;
  if (in_one_message(context, bytes)) {
    const std::vector<int> members = rail(topology, 0, root);
    if (members[topology.node_of(me)] == me) {
      CollectiveContext between = context.among(members);
      dispatch::broadcast({between, Algo::automatic}, data, bytes, home);
    }
    node.broadcast(data, bytes, at_home ? topology.place_of(root) : 0);
    return node.end();
  }

  const int shards = topology.narrowest(), place = node.place();
  const bool on_rail = place < shards;
  const size_t each = stage_numel(context, 1), stages = schedule::divide_up(bytes, each);
  const std::vector<int> members = on_rail ? rail(topology, place) : std::vector<int>{me};
  CollectiveContext between = context.among(members);
  const int next = between.after(1), previous = between.after(between.size() - 1);
  const bool ends = next == home;  // of the chain
  auto* at = static_cast<uint8_t*>(data);
  const auto stage = [&](size_t t) { return schedule::segment({0, bytes}, each, t); };
  const auto own = [&](size_t t) { return shard(stage(t), shards, place, 1); };

  context.set_source(root);
  std::vector<uint64_t> tickets;
  for (size_t t = 0; on_rail && !at_home && t < stages; t++) {
    tickets.push_back(between.recv(previous, at + own(t).begin, own(t).size()));
  }
  for (size_t t = 0; t < stages; t++) {
    if (at_home) {
      node.broadcast(at + stage(t).begin, stage(t).size(), topology.place_of(root));
    } else if (on_rail) {
      between.wait(previous, tickets[t]);
    }
    if (on_rail && !ends) between.send(next, at + own(t).begin, own(t).size());
    context.progress();
    if (at_home) continue;
    const auto list = shards_of(data, stage(t), shards, node.size(), 1);
    node.all_gather(at + own(t).begin, Parts(list).of(1));
  }
  context.wait_all();
  node.end();
}

void barrier(CollectiveContext& context) {
  Node node(context);
  node.barrier();
  if (node.place() == 0) {
    const std::vector<int> first = rail(context.topology(), 0);
    CollectiveContext between = context.among(first);
    dispatch::barrier({between, Algo::automatic});
  }
  node.barrier();
  node.end();
}

}  // namespace pycomm::hierarchical
