#include "collectives/coded/coded.h"

#include "collectives/algorithms/dispatch.h"
#include "collectives/algorithms/rails.h"
#include "collectives/coded/channels.h"
#include "collectives/coded/two_shot.h"
#include "core/crc32c.h"
#include "core/reduce.h"

namespace pycomm::coded {
namespace {

uint32_t signature(const CodedArgs& args) {
  uint32_t hash = 0;
  const auto add = [&hash](const void* data, size_t bytes) {
    hash = crc32c({static_cast<const uint8_t*>(data), bytes}, hash);
  };
  const auto add_number = [&add](uint64_t x) { add(&x, sizeof x); };
  const Codec* last = nullptr;
  for (const Piece& p : args.pieces) {
    if (p.codec != last) {
      const std::string spec = p.codec->spec();
      add(spec.data(), spec.size());
      add_number(static_cast<uint64_t>(p.codec->wire_version()));
      last = p.codec;
    }
    add_number(p.numel);
    add_number(p.tensor);
  }
  add_number(args.average);
  add_number(args.seed);
  add_number(args.step);
  add_number(args.owner_residuals);
  return hash ? hash : 1;
}

}  // namespace

void check(const char* op, const CodedArgs& args, size_t rows) {
  size_t end = 0;
  const auto fail = [op](size_t piece, const std::string& what) {
    throw Error(std::string(op) + ": piece " + std::to_string(piece) + " " + what);
  };
  for (size_t i = 0; i < args.pieces.size; i++) {
    const Piece& p = args.pieces[i];
    if (!p.codec) fail(i, "has no codec");
    for (const feedback::Memory& m : {p.worker.error, p.worker.momentum, p.owner.error}) {
      if (!m.old != !m.fresh) {
        fail(i, "has a residual to read but none to write, or the other way round");
      }
    }
    if (p.owner.error && !args.owner_residuals) {
      fail(i, "has a residual of an owner, although no rank is said to have one");
    }
    if (p.numel > args.data.size - end) {  // so no sum wraps
      fail(i, "has " + std::to_string(p.numel) + " elements, but only " +
                  std::to_string(args.data.size - end) + " of " + std::to_string(args.data.size) +
                  " are left");
    }
    end += p.numel;
  }
  const DType dtype = args.data.dtype;
  if (dtype != DType::float32 && dtype != DType::float16 && dtype != DType::bfloat16) {
    throw Error(std::string(op) + ": takes float32, float16 and bfloat16, not " + name(dtype));
  }
  if (args.data.size % rows != 0 || args.data.size / rows != end) {
    throw Error(std::string(op) + ": the pieces cover " + std::to_string(end) + " elements of " +
                (rows > 1 ? std::to_string(rows) + " rows, together " : "") +
                std::to_string(args.data.size));
  }
}

OpTag tag_of(Op op, const CodedArgs& args) {
  OpTag tag =
      make_tag(op, args.data.size, args.data.dtype, args.average ? ReduceOp::avg : ReduceOp::sum);
  tag.codec = signature(args);
  const Piece* largest = nullptr;
  for (const Piece& p : args.pieces) {
    if (!largest || p.numel > largest->numel) largest = &p;
  }
  if (largest) largest->codec->spec().copy(tag.label, sizeof tag.label - 1);
  return tag;
}

uint64_t hop_seed(uint64_t seed, int rank) {
  uint64_t z = seed + 0x9e3779b97f4a7c15ull * static_cast<uint64_t>(rank + 2);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

// ------------------------------------------------------------------ one shot or two

namespace {

/// Seconds to encode or to decode a value, of the slower codecs on one core.
constexpr double kCode = 0.8e-9;

struct Decision {
  bool one_shot;
  std::string why;
};

/// Decides if `values` of an operation go in one shot: if `wanted` says so, else if ranks are far
/// from each other and it takes less time. Never with a codec whose payloads all ranks get anyway,
/// nor where an owner may have a residual, which other ranks do not know. Equal on all ranks.
Decision decide(const CodedArgs& args, const PieceRuns& values, Algo wanted, int ranks,
                const Speed& speed) {
  size_t numel = 0, payload = 0;
  for (const PieceRun& run : values) {
    const Codec& codec = *args.pieces[run.piece].codec;
    if (codec.combine() == Combine::gather) {
      return {false,
              "payloads of " + std::string(codec.name()) + " go to all ranks, which sum them"};
    }
    numel += run.numel;
    payload += codec.encoded_bytes(run.numel);
  }
  if (args.owner_residuals) return {false, "owners may have residuals"};
  if (ranks < 2) return {false, "there is one rank"};
  if (wanted == Algo::two_shot || wanted == Algo::one_shot) {
    return {wanted == Algo::one_shot, "it was asked for"};
  }
  if (speed.way == 0) return {false, "ranks are near each other"};
  const ShotCosts costs = shot_costs(numel, payload, ranks, speed);
  return {costs.one < costs.two,
          time_text(costs.one) + " in one shot, " + time_text(costs.two) + " in two"};
}

}  // namespace

// A rank encodes what it contributes and decodes the result. As an owner of one part of n it also
// decodes n contributions to that part, and encodes their sum; in one shot it does so for all.
// Coding and sending overlap, but where no rate is known the link may be too fast to hide any work.
ShotCosts shot_costs(size_t values, size_t payload, int ranks, const Speed& speed) {
  const double n = ranks, code = kCode * static_cast<double>(values);
  const double work_one = (2 + n + 1) * code, work_two = (2 + (n + 1) / n) * code;
  const double byte = speed.byte * static_cast<double>(payload);
  double one = (n - 1) * byte, two = 2 * (n - 1) / n * byte;
  if (speed.shared == 0) return {speed.way + (one - two) + work_one, 2 * speed.way + work_two};
  two = std::min(two, speed.shared * byte);
  return {speed.way + std::max(one, work_one), 2 * speed.way + std::max(two, work_two)};
}

std::string explain(const CodedArgs& args, Algo wanted, int ranks, const Speed& speed) {
  const Decision found = decide(args, values_of(args.pieces), wanted, ranks, speed);
  return std::string(found.one_shot ? "one_shot: " : "two_shot: ") + found.why;
}

// ------------------------------------------------------------------ operations over channels

namespace {

/// Returns true if the result is finite, of what this rank has decoded.
bool exchange(CollectiveContext& context, const CodedArgs& args, void* out, Channels& channels,
              const Plan& plan, int divisor) {
  CoderOptions options;
  options.rank = context.rank();
  options.divisor = divisor;
  options.timing = &context.timing();
  Coder coder(args, out, context.feedback_scratch(), options);
  TwoShot(channels, coder, plan).run();
  context.wait_all();
  return coder.finite();
}

bool flat(CollectiveContext& context, Algo wanted, const CodedArgs& args, const PieceRuns& values,
          int divisor) {
  const bool one_shot = decide(args, values, wanted, context.size(), context.speed()).one_shot;
  if (context.is_group()) context.note_algo(one_shot ? "one_shot" : "two_shot");
  const Speed shown_at = one_shot ? Speed() : context.speed();
  const Plan plan =
      all_reduce_plan(args.pieces, values, context.size(), one_shot,
                      coded_segment(context.segment_bytes(), context.speed()),
                      coded_segment(context.segment_bytes(), shown_at), context.shares());
  Channels channels(context, plan);
  return exchange(context, args, args.data.data, channels, plan, divisor);
}

// An all-reduce node by node is exact in a node, and the rank at each place codes a shard of the
// sum, in coded all-reduces between the nodes. A node has the role of a rank in the coding: its
// residual lies on the rank that has coded the shard.

/// The exchange of ranks whose nodes share memory, each rank at a place of its node. The rank
/// at each place has a shard of the bucket, which it exchanges with the ranks at its place in other
/// nodes; a node has the role of a rank in the coding. Segment by segment, the ranks of a node make
/// the node's exact sum of what they encode, and show each other the payloads of results. All ranks
/// of a node do this in one order: first all sums, then the results of their own chunks, then those
/// of the others.
class Nodes final : public Channels {
 public:
  Nodes(CollectiveContext& rail, Node& node, const Topology& topology, const Plan& plan,
        const CodedArgs& args);

  void make(int owner, size_t s) override;
  bool has(Shot shot, int rank, size_t s) override;
  Span<const Received> get_places(int owner, size_t s) override;

 private:
  Node& node_;
  const Topology& topology_;
  const Plan& plan_;
  const CodedArgs& args_;
  std::vector<uint8_t> arrivals_;  ///< payloads of the other places
  std::vector<Received> results_;
  std::vector<std::pair<int, size_t>> order_;  ///< of results: owners and segments
  size_t turn_ = 0;
};

Nodes::Nodes(CollectiveContext& rail, Node& node, const Topology& topology, const Plan& plan,
             const CodedArgs& args)
    : Channels(rail, plan), node_(node), topology_(topology), plan_(plan), args_(args) {
  size_t most = 0;
  for (const BucketLayout& place : plan.places) most = std::max(most, place.most_bytes());
  arrivals_.resize(most * plan.places.size());
  for (size_t s = 0; s < plan.count(rank()); s++) order_.emplace_back(rank(), s);
  for (size_t s = 0; s < plan.most(); s++) {
    for (int i = 1; i < size(); i++) {
      if (s < plan.count(after(i))) order_.emplace_back(after(i), s);
    }
  }
}

void Nodes::make(int owner, size_t s) {
  std::vector<ConstPart> parts(static_cast<size_t>(node_.size()));
  for (size_t p = 0; p < plan_.places.size(); p++) {
    const BucketLayout& place = plan_.places[p];
    if (s >= place.count(owner)) continue;
    const Span<const PieceRun> runs = place.runs(place.at(owner, s));
    parts[p] = {args_.data.at(args_.pieces[runs[0].piece].offset + runs[0].offset), numel_of(runs)};
  }
  void* const own = const_cast<void*>(parts[static_cast<size_t>(node_.place())].data);
  node_.reduce_scatter(ConstParts(parts).of(sizeof(float)).aligned(), own,
                       {DType::float32, ReduceOp::sum});
}

bool Nodes::has(Shot shot, int rank, size_t s) {
  if (shot != Shot::result) return Channels::has(shot, rank, s);
  if (turn_ == order_.size() || order_[turn_] != std::make_pair(rank, s)) return false;
  return s >= plan_.owned.count(rank) || Channels::has(shot, rank, s);
}

Span<const Received> Nodes::get_places(int owner, size_t s) {
  results_.clear();
  std::vector<Part> parts;
  uint8_t* place = arrivals_.data();
  for (size_t p = 0; p < static_cast<size_t>(node_.size()); p++) {
    const bool has = p < plan_.places.size() && s < plan_.places[p].count(owner);
    parts.push_back({place, has ? plan_.places[p].at(owner, s).bytes : 0});
    place += parts.back().numel;
  }
  const auto ours = static_cast<size_t>(node_.place());
  if (parts[ours].numel > 0) {
    parts[ours].data = const_cast<uint8_t*>(get(Shot::result, owner, s).data);
  }
  node_.all_gather(parts[ours].data, parts);
  for (size_t p = 0; p < plan_.places.size(); p++) {
    results_.push_back(
        {{static_cast<uint8_t*>(parts[p].data), parts[p].numel}, topology_.node(owner)[p]});
  }
  turn_++;
  return {results_.data(), results_.size()};
}

/// Ranks of a node wait for each other at each segment, so it has as many values as so many flat
/// ones: 64 MiB as int4 over 1 Gbit/s took 176 ms on two busy cores with 1, 160 with 2, 106 with 4.
constexpr size_t kSegmentsAtOnce = 4;

/// Returns the plan by segments of the rank at a place.
Plan plan_of_places(CollectiveContext& context, const CodedArgs& args, const PieceRuns& values,
                    int place) {
  const Topology& topology = context.topology();
  const size_t segment = kSegmentsAtOnce * coded_segment(context.segment_bytes(), context.speed());
  const int shards = topology.narrowest();
  Plan plan;
  for (int p = 0; p < shards; p++) {
    const std::vector<int> members = hierarchical::rail(topology, p);
    plan.places.emplace_back(args.pieces, share_of(args.pieces, values, shards, p),
                             topology.nodes(), segment, context.among(members).shares());
  }
  if (place < shards) plan.owned = plan.places[static_cast<size_t>(place)];
  return plan;
}

/// Sums, codes and gathers the shards one after the other, each as a whole.
bool in_turn(CollectiveContext& context, Node& node, Algo wanted, const CodedArgs& args,
             const PieceRuns& values) {
  const int shards = context.topology().narrowest();
  std::vector<Part> parts;
  PieceRuns ours;
  size_t end = 0;
  for (int p = 0; p < node.size(); p++) {
    const PieceRuns shard = p < shards ? share_of(args.pieces, values, shards, p) : PieceRuns();
    parts.push_back({args.data.at(end), numel_of({shard.data(), shard.size()})});
    end += parts.back().numel;
    if (p == node.place()) ours = shard;
  }
  hierarchical::through_nodes(context, node, parts, {DType::float32, ReduceOp::sum},
                              [&](CollectiveContext& rail, const Part&) {
                                flat(rail, wanted, args, ours, context.size());
                              });
  return all_finite({static_cast<float*>(args.data.data), args.data.size});
}

/// Does all of that segment by segment, where ranks of a node share memory and the links have more
/// than a segment to carry.
bool by_nodes(CollectiveContext& context, Algo wanted, const CodedArgs& args,
              const PieceRuns& values) {
  Node node(context);
  const Topology& topology = context.topology();
  const Plan plan = plan_of_places(context, args, values, node.place());
  const bool gathers = std::any_of(args.pieces.begin(), args.pieces.end(), [](const Piece& piece) {
    return piece.codec->combine() == Combine::gather;
  });
  bool finite;
  if (gathers || !node.shares_memory() || plan.most() <= 1 ||
      decide(args, values, wanted, topology.nodes(), context.speed()).one_shot) {
    finite = in_turn(context, node, wanted, args, values);
  } else {
    const int place = node.place() < topology.narrowest() ? node.place() : 0;
    const std::vector<int> members = hierarchical::rail(topology, place, context.rank());
    CollectiveContext rail = context.among(members);
    Nodes nodes(rail, node, topology, plan, args);
    finite = exchange(rail, args, args.data.data, nodes, plan, context.size());
  }
  node.end();
  return finite;
}

// Widens the buffer: the exact sum of a node is float32 as a whole. Its memory stays for later
// calls, since fresh pages take as long as what is done in them.
bool by_nodes_wide(CollectiveContext& context, Algo wanted, CodedArgs args,
                   const PieceRuns& values) {
  const Values bucket = args.data;
  if (bucket.dtype == DType::float32) return by_nodes(context, wanted, args, values);
  float* const wide = context.feedback_scratch().get(feedback::Scratch::kFloat32, bucket.size);
  args.data = {wide, bucket.size, DType::float32};
  ConvertArgs whole;
  whole.in = bucket.data;
  whole.from = bucket.dtype;
  whole.out = wide;
  whole.numel = bucket.size;
  convert(whole);
  by_nodes(context, wanted, args, values);
  float found_inf = 0.0f;
  std::swap(whole.from, whole.to);
  whole.in = wide;
  whole.out = bucket.data;
  whole.found_inf = &found_inf;
  convert(whole);
  return found_inf == 0.0f;
}

}  // namespace

bool run(CollectiveContext& context, Op op, Algo wanted, const CodedArgs& args, void* out) {
  if (op == Op::all_reduce) {
    const PieceRuns values = values_of(args.pieces);
    if (dispatch::by_levels(context, wanted)) return by_nodes_wide(context, wanted, args, values);
    return flat(context, wanted, args, values, context.size());
  }
  context.note_algo("one_shot");
  const Plan plan = reduce_scatter_plan(args.pieces, context.size(),
                                        coded_segment(context.segment_bytes(), context.speed()));
  Channels channels(context, plan);
  uint8_t finite = exchange(context, args, out, channels, plan, context.size());
  // Each owner knows it of its own row alone.
  dispatch::run({context, Algo::direct},
                Collective::all_reduce(&finite, 1, {DType::uint8, ReduceOp::min}));
  return finite != 0;
}

}  // namespace pycomm::coded
