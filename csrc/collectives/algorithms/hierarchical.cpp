#include <memory>

#include "collectives/algorithms/algorithms.h"
#include "collectives/algorithms/dispatch.h"
#include "collectives/algorithms/rails.h"

namespace pycomm::hierarchical {
namespace {

using schedule::Range;

// The buffer goes through in stages, of which three are in progress at a time. Each stage is
// reduced in the node, reduced between the nodes and gathered in the node:
//
//   reduce_in_node(t)   our shard of the node's sum; its chunks go to their owners on the rail
//   own_chunk(t-1)      adds the nodes' sums of our chunk; the result goes back along the rail
//   gather_in_node(t-2) the results of our shard have arrived; gathers the node's shards
//
// So the network transfers bytes while the node works on the next stage. A slot of memory is free
// again three stages later: our peers had read it before they could send their results.
class AllReduce {
 public:
  AllReduce(CollectiveContext& context, void* data, size_t numel, const Fold& fold)
      : ex_(context),
        node_(context),
        fold_(fold),
        data_(static_cast<uint8_t*>(data)),
        numel_(numel),
        element_(size_of(fold.dtype)),
        stage_numel_(hierarchical::stage_numel(context, element_)),
        shards_(context.topology().narrowest()),
        on_rail_(node_.place() < shards_),
        members_(on_rail_ ? hierarchical::rail(context.topology(), node_.place())
                          : std::vector<int>{context.rank()}),
        rail_(context.among(members_)),
        tickets_(kSlots, std::vector<uint64_t>(members_.size())) {
    // No later stage is larger than the first. In one of another size our shard, and our chunk of
    // it, may be a line longer than in the first, which may end within a line.
    shard_bytes_ = (shard(0).size() + schedule::line(element_)) * element_;
    chunk_bytes_ = (chunk(0, rail_.rank()).size() + schedule::line(element_)) * element_;
    slots_ = context.scratch(kSlots * slot_bytes());
  }

  void run() {
    const size_t stages = schedule::divide_up(numel_, stage_numel_);
    for (size_t t = 0; t < stages + 2; t++) {
      if (t < stages) reduce_in_node(t);
      if (on_rail_ && t >= 1 && t - 1 < stages) own_chunk(t - 1);
      if (t >= 2) gather_in_node(t - 2);
    }
    ex_.wait_all();
    node_.end();
  }

 private:
  static constexpr size_t kSlots = 3;

  Range stage(size_t t) const { return schedule::segment({0, numel_}, stage_numel_, t); }
  Range shard(size_t t) const {
    return hierarchical::shard(stage(t), shards_, node_.place(), element_);
  }
  Range chunk(size_t t, int k) const {
    const Range all = shard(t);
    const Range part =
        schedule::chunk(all.size(), rail_.size(), k, schedule::line(element_), rail_.shares());
    return {all.begin + part.begin, all.begin + part.end};
  }
  uint8_t* at(size_t i) const { return data_ + i * element_; }
  /// Bytes of a slot: the node's sum of our shard, and our chunk of the sums of the other nodes.
  size_t slot_bytes() const { return shard_bytes_ + chunk_bytes_ * members_.size(); }
  uint8_t* partial(size_t t) const { return slots_ + t % kSlots * slot_bytes(); }
  uint8_t* arrival(size_t t, int k) const {
    return partial(t) + shard_bytes_ + chunk_bytes_ * static_cast<size_t>(k);
  }
  uint64_t& ticket(size_t t, int k) { return tickets_[t % kSlots][k]; }

  void reduce_in_node(size_t t) {
    const auto list = shards_of<const void>(data_, stage(t), shards_, node_.size(), element_);
    node_.reduce_scatter(ConstParts(list).of(element_).aligned(), partial(t), fold_.between());
    if (!on_rail_) return;
    const size_t begin = shard(t).begin, own = chunk(t, rail_.rank()).size() * element_;
    for (int i = 1; i < rail_.size(); i++) {
      const int k = rail_.after(i);
      const Range part = chunk(t, k);
      rail_.send(k, partial(t) + (part.begin - begin) * element_, part.size() * element_);
      ticket(t, k) = rail_.recv(k, arrival(t, k), own);
    }
    ex_.progress();
  }

  void own_chunk(size_t t) {
    const int n = rail_.size(), me = rail_.rank();
    const Range own = chunk(t, me);
    std::vector<const void*> inputs(n);
    for (int k = 0; k < n; k++) {
      if (k != me) rail_.wait(k, ticket(t, k));
      inputs[k] = k == me ? partial(t) + (own.begin - shard(t).begin) * element_ : arrival(t, k);
    }
    fold_.last(ex_.size())(inputs.data(), n, at(own.begin), own.size());
    for (int i = 1; i < n; i++) {
      const int k = rail_.after(i);
      const Range theirs = chunk(t, k);
      rail_.send(k, at(own.begin), own.size() * element_);
      ticket(t, k) = rail_.recv(k, at(theirs.begin), theirs.size() * element_);
    }
    ex_.progress();
  }

  void gather_in_node(size_t t) {
    for (int k = 0; on_rail_ && k < rail_.size(); k++) {
      if (k != rail_.rank()) rail_.wait(k, ticket(t, k));
    }
    const auto list = shards_of<void>(data_, stage(t), shards_, node_.size(), element_);
    node_.all_gather(at(shard(t).begin), Parts(list).of(element_));
  }

  CollectiveContext& ex_;
  Node node_;
  Fold fold_;
  uint8_t* data_;
  size_t numel_, element_, stage_numel_;
  int shards_;
  bool on_rail_;
  std::vector<int> members_;
  CollectiveContext rail_;
  std::vector<std::vector<uint64_t>> tickets_;  // of a slot, from each node
  size_t shard_bytes_ = 0, chunk_bytes_ = 0;
  uint8_t* slots_ = nullptr;
};

// Ranks of a site exchange over channels, which a stage at a time would wait for, and its link to
// the others is the slow one: so the buffer goes as a whole, and two shots between the sites
// overlap.
void all_reduce_by_sites(CollectiveContext& context, Node& node, void* data, size_t numel,
                         const Fold& fold) {
  const int shards = context.topology().narrowest();
  const auto parts = shards_of(data, {0, numel}, shards, node.size(), size_of(fold.dtype));
  through_nodes(context, node, parts, fold, [&](CollectiveContext& between, const Part& own) {
    dispatch::run({between, Algo::automatic},
                  Collective::all_reduce(own.data, own.numel, fold.last(context.size())));
  });
}

// Every part is summed in every node by one rank, which sends the sum to the part's rank. Parts of
// one node are dealt out to the ranks of another by their places, in as many hands as needed.
class ReduceScatter {
 public:
  ReduceScatter(CollectiveContext& context, const Collective& call)
      : ex_(context),
        node_(context),
        topology_(context.topology()),
        fold_(call.fold()),
        in_(call.in),
        out_(static_cast<uint8_t*>(call.out.data())),
        element_(size_of(call.dtype)),
        stage_numel_(hierarchical::stage_numel(context, element_)),
        home_(topology_.node_of(context.rank())) {
    for (int r = 0; r < context.size(); r++) longest_ = std::max(longest_, in_.numel(r));
    const size_t nodes = topology_.nodes();
    for (int k = 0; k < topology_.nodes(); k++) {
      if (k != home_) sums_ += hands(k);
    }
    slot_bytes_ = std::min(stage_numel_, longest_) * element_ * (nodes + sums_);
    slots_ = context.scratch(kSlots * slot_bytes_);
    received_.assign(kSlots, std::vector<uint64_t>(nodes));
    sent_.assign(kSlots, std::vector<Sent>(sums_));
  }

  void run() {
    const size_t stages = schedule::divide_up(longest_, stage_numel_);
    for (size_t t = 0; t < stages + 1; t++) {
      if (t < stages) reduce_in_node(t);
      if (t >= 1) meet(t - 1);
    }
    ex_.wait_all();
    node_.end();
  }

 private:
  static constexpr size_t kSlots = 2;
  struct Sent {
    int rank = -1;
    uint64_t ticket = 0;
  };

  size_t hands(int node) const {
    return schedule::divide_up(topology_.node(node).size(), node_.size());
  }
  Range stage(size_t t, int rank) const {
    const size_t numel = in_.numel(rank), begin = std::min(numel, t * stage_numel_);
    return {begin, std::min(numel, begin + stage_numel_)};
  }
  /// Memory of a slot: what arrives from each node (at our index: our own node's sum), then what we
  /// send.
  uint8_t* place(size_t t, size_t index) const {
    const size_t each = std::min(stage_numel_, longest_) * element_;
    return slots_ + t % kSlots * slot_bytes_ + index * each;
  }

  /// Returns the rank of a node whose part its hand deals to `place`, or -1 if there is none.
  int dealt(int node, size_t hand, int place) const {
    const std::vector<int>& ranks = topology_.node(node);
    const size_t index = hand * static_cast<size_t>(node_.size()) + static_cast<size_t>(place);
    return index < ranks.size() ? ranks[index] : -1;
  }
  /// Returns the rank of a node that has its sum of our part.
  int source_in(int node) const {
    const std::vector<int>& ranks = topology_.node(node);
    return ranks[static_cast<size_t>(node_.place()) % ranks.size()];
  }
  void reduce_hand(size_t t, int node, size_t hand, uint8_t* sum) {
    std::vector<ConstPart> list;
    for (int p = 0; p < node_.size(); p++) {
      const int rank = dealt(node, hand, p);
      if (rank < 0) {
        list.push_back({in_[0].data, 0});
      } else {
        const Range part = stage(t, rank);
        list.push_back({in_[rank].data + part.begin * element_, part.size()});
      }
    }
    node_.reduce_scatter(ConstParts(list).of(element_), sum, fold_.between());
  }

  void reduce_in_node(size_t t) {
    const int nodes = topology_.nodes(), me = ex_.rank();
    const size_t own = stage(t, me).size() * element_;
    size_t sum = 0;
    for (int i = 1; i < nodes; i++) {
      const int k = (home_ + i) % nodes;
      for (size_t hand = 0; hand < hands(k); hand++, sum++) {
        Sent& sent = sent_[t % kSlots][sum];
        if (sent.rank >= 0) ex_.wait_sent(sent.rank, sent.ticket);
        uint8_t* bytes = place(t, static_cast<size_t>(nodes) + sum);
        reduce_hand(t, k, hand, bytes);
        sent.rank = dealt(k, hand, node_.place());
        if (sent.rank < 0) continue;
        sent.ticket = ex_.send(sent.rank, bytes, stage(t, sent.rank).size() * element_);
      }
      received_[t % kSlots][k] = ex_.recv(source_in(k), place(t, k), own);
      ex_.progress();
    }
    reduce_hand(t, home_, 0, place(t, home_));
  }

  void meet(size_t t) {
    const Range own = stage(t, ex_.rank());
    std::vector<const void*> inputs;
    for (int k = 0; k < topology_.nodes(); k++) {
      if (k != home_) ex_.wait(source_in(k), received_[t % kSlots][k]);
      inputs.push_back(place(t, k));
    }
    fold_.last(ex_.size())(inputs.data(), topology_.nodes(), out_ + own.begin * element_,
                           own.size());
  }

  CollectiveContext& ex_;
  Node node_;
  const Topology& topology_;
  Fold fold_;
  const ConstParts& in_;
  uint8_t* out_;
  size_t element_, stage_numel_;
  size_t longest_ = 0;
  int home_;
  size_t sums_ = 0;  // that we make for ranks of other nodes in a stage
  size_t slot_bytes_ = 0;
  uint8_t* slots_ = nullptr;
  std::vector<std::vector<uint64_t>> received_;  // of a slot, from each node
  std::vector<std::vector<Sent>> sent_;
};

// Runs a call between the nodes; the first rank of each takes part, and of the root's node the
// root.
void between_nodes(CollectiveContext& context, const Collective& call, int root = -1) {
  const std::vector<int> members = rail(context.topology(), 0, root);
  if (members[context.topology().node_of(context.rank())] != context.rank()) return;
  CollectiveContext between = context.among(members);
  dispatch::run({between, Algo::automatic}, call);
}

// Returns the bytes of segment t of a part.
Span<uint8_t> segment(const Span<uint8_t>& part, size_t bytes, size_t t) {
  const size_t begin = std::min(part.size, t * bytes);
  return part.sub(begin, std::min(bytes, part.size - begin));
}

}  // namespace

void all_reduce(CollectiveContext& context, const Collective& call) {
  void* const data = call.out.data();
  const size_t numel = call.out.numel(0), bytes = call.out.bytes(0);
  const Fold fold = call.fold();
  const bool small = in_one_message(context, bytes);
  if (!small && !context.has_sites()) return AllReduce(context, data, numel, fold).run();
  Node node(context);
  if (!small) {
    all_reduce_by_sites(context, node, data, numel, fold);
    return node.end();
  }
  node.run(Collective::all_reduce(data, numel, fold.between()));
  between_nodes(context, Collective::all_reduce(data, numel, fold.last(context.size())));
  node.run(Collective::broadcast(data, bytes, 0));
  node.end();
}

void reduce_scatter(CollectiveContext& context, const Collective& call) {
  ReduceScatter(context, call).run();
}

// The sums of an all_reduce, of which only the root keeps the result: the order is the same, and
// between the nodes so are the bytes.
void reduce(CollectiveContext& context, const Collective& call) {
  const Span<const uint8_t> in = call.in[0];
  const bool here = context.rank() == call.root;
  const std::unique_ptr<uint8_t[]> sums(here ? nullptr : new uint8_t[in.size]);
  void* data = here ? call.out.data() : sums.get();
  copy_bytes(data, in.data, in.size);
  all_reduce(context, Collective::all_reduce(data, call.in.numel(0), call.fold()));
}

// ------------------------------------------------------------------ what only moves bytes

// Every part goes once to every other node, to the rank with the same place there; then the ranks
// of a node share what they have received.
void all_gather(CollectiveContext& context, const Collective& call) {
  Node node(context);
  const Parts& out = call.out;
  const Topology& topology = context.topology();
  const int me = context.rank(), home = topology.node_of(me), nodes = topology.nodes();
  const size_t each = stage_numel(context, 1);
  const auto place = static_cast<size_t>(node.place()), size = static_cast<size_t>(node.size());
  size_t longest = 0;
  for (int r = 0; r < context.size(); r++) longest = std::max(longest, out.bytes(r));
  const size_t stages = schedule::divide_up(longest, each);

  const auto* ours = static_cast<const uint8_t*>(call.in.data());
  std::vector<uint64_t> tickets(stages * static_cast<size_t>(context.size()));
  const auto ticket = [&](size_t t, int rank) -> uint64_t& {
    return tickets[t * static_cast<size_t>(context.size()) + static_cast<size_t>(rank)];
  };
  for (size_t t = 0; t < stages; t++) {
    for (int i = 1; i < nodes; i++) {
      const std::vector<int>& ranks = topology.node((home + i) % nodes);
      const Span<uint8_t> own = segment(out[me], each, t);
      context.send(ranks[place % ranks.size()], ours + (own.data - out[me].data), own.size);
      for (size_t index = place; index < ranks.size(); index += size) {
        const Span<uint8_t> theirs = segment(out[ranks[index]], each, t);
        ticket(t, ranks[index]) = context.recv(ranks[index], theirs.data, theirs.size);
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
        if (index < ranks.size()) context.wait(ranks[index], ticket(t, ranks[index]));
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
void broadcast(CollectiveContext& context, const Collective& call) {
  Node node(context);
  void* const data = call.out.data();
  const size_t bytes = call.out.bytes(0);
  const int root = call.root;
  const Topology& topology = context.topology();
  const int me = context.rank(), home = topology.node_of(root);
  const bool at_home = topology.node_of(me) == home;
  if (in_one_message(context, bytes)) {
    between_nodes(context, Collective::broadcast(data, bytes, home), root);
    node.run(Collective::broadcast(data, bytes, at_home ? topology.place_of(root) : 0));
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
      node.run(
          Collective::broadcast(at + stage(t).begin, stage(t).size(), topology.place_of(root)));
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

void barrier(CollectiveContext& context, const Collective& call) {
  Node node(context);
  node.run(call);
  between_nodes(context, call);
  node.run(call);
  node.end();
}

}  // namespace pycomm::hierarchical
