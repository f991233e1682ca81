// Hierarchical collectives that reduce. Those that only move bytes: hierarchical_move.cpp.
#include <cstring>
#include <memory>

#include "collectives/algorithms/dispatch.h"
#include "collectives/algorithms/hierarchical.h"
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
    // No later stage is larger than the first; in one of another size our chunk may be a line
    // longer than in the first.
    shard_bytes_ = shard(0).size() * element_;
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
    node_.reduce_scatter(ConstParts(list).of(element_), partial(t), fold_.between());
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
  const size_t element = size_of(fold.dtype);
  const int shards = context.topology().narrowest();
  const auto parts = shards_of(data, {0, numel}, shards, node.size(), element);
  const auto inputs =
      shards_of(static_cast<const void*>(data), {0, numel}, shards, node.size(), element);
  const Part own = parts[static_cast<size_t>(node.place())];
  node.reduce_scatter(ConstParts(inputs).of(element), own.data, fold.between());
  if (node.place() < shards) {
    const std::vector<int> members = rail(context.topology(), node.place());
    CollectiveContext between = context.among(members);
    dispatch::all_reduce({between, Algo::automatic}, own.data, own.numel,
                         fold.last(context.size()));
  }
  node.all_gather(own.data, Parts(parts).of(element));
}

// Every part is summed in every node by one rank, which sends the sum to the part's rank. Parts of
// one node are dealt out to the ranks of another by their places, in as many hands as needed.
class ReduceScatter {
 public:
  ReduceScatter(CollectiveContext& context, const ConstParts& in, void* out, const Fold& fold)
      : ex_(context),
        node_(context),
        topology_(context.topology()),
        fold_(fold),
        in_(in),
        out_(static_cast<uint8_t*>(out)),
        element_(size_of(fold.dtype)),
        stage_numel_(hierarchical::stage_numel(context, element_)),
        home_(topology_.node_of(context.rank())) {
    for (int r = 0; r < context.size(); r++) longest_ = std::max(longest_, in.numel(r));
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
      const std::vector<int>& ranks = topology_.node(k);
      const int source = ranks[static_cast<size_t>(node_.place()) % ranks.size()];
      received_[t % kSlots][k] = ex_.recv(source, place(t, k), own);
      ex_.progress();
    }
    reduce_hand(t, home_, 0, place(t, home_));
  }

  void meet(size_t t) {
    const Range own = stage(t, ex_.rank());
    std::vector<const void*> inputs;
    for (int k = 0; k < topology_.nodes(); k++) {
      const std::vector<int>& ranks = topology_.node(k);
      const int source = ranks[static_cast<size_t>(node_.place()) % ranks.size()];
      if (k != home_) ex_.wait(source, received_[t % kSlots][k]);
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

}  // namespace

void all_reduce(CollectiveContext& context, void* data, size_t numel, const Fold& fold) {
  const size_t bytes = numel * size_of(fold.dtype);
  const bool small = in_one_message(context, bytes);
  if (!small && !context.has_sites()) return AllReduce(context, data, numel, fold).run();
  Node node(context);
  if (!small) {
    all_reduce_by_sites(context, node, data, numel, fold);
    return node.end();
  }
  node.all_reduce(data, numel, fold.between());
  if (node.place() == 0) {
    const std::vector<int> first = rail(context.topology(), 0);
    CollectiveContext between = context.among(first);
    dispatch::all_reduce({between, Algo::automatic}, data, numel, fold.last(context.size()));
  }
  node.broadcast(data, bytes, 0);
  node.end();
}

void reduce_scatter(CollectiveContext& context, const ConstParts& in, void* out, const Fold& fold) {
  ReduceScatter(context, in, out, fold).run();
}

// The sums of an all_reduce, of which only the root keeps the result: the order is the same, and
// between the nodes so are the bytes.
void reduce(CollectiveContext& context, const void* in, void* out, size_t numel, const Fold& fold,
            int root) {
  const size_t bytes = numel * size_of(fold.dtype);
  const bool here = context.rank() == root;
  const std::unique_ptr<uint8_t[]> sums(here ? nullptr : new uint8_t[bytes]);
  void* data = here ? out : sums.get();
  if (bytes > 0 && data != in) std::memmove(data, in, bytes);
  all_reduce(context, data, numel, fold);
}

}  // namespace pycomm::hierarchical
