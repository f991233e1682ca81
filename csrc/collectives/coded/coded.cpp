#include "collectives/coded/coded.h"

#include "collectives/algorithms/dispatch.h"
#include "collectives/algorithms/rails.h"
#include "collectives/coded/nodes.h"
#include "collectives/coded/one_shot.h"
#include "collectives/coded/two_shot.h"
#include "core/reduce.h"

namespace pycomm::coded {
namespace {

// FNV-1a (Fowler, Noll, Vo), 64 bits.
class Hash {
 public:
  void add(const void* data, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) {
      value_ = (value_ ^ static_cast<const uint8_t*>(data)[i]) * 0x100000001b3ull;
    }
  }
  void add(uint64_t x) { add(&x, sizeof x); }
  uint32_t value() const { return static_cast<uint32_t>(value_ ^ value_ >> 32); }

 private:
  uint64_t value_ = 0xcbf29ce484222325ull;
};

uint32_t signature(const CodedArgs& args) {
  Hash hash;
  const Codec* last = nullptr;
  for (const Piece& p : args.pieces) {
    if (p.codec != last) {
      const std::string spec = p.codec->spec();
      hash.add(spec.data(), spec.size());
      hash.add(static_cast<uint64_t>(p.codec->wire_version()));
      last = p.codec;
    }
    hash.add(p.numel);
    hash.add(p.tensor);
  }
  hash.add(args.average);
  hash.add(args.seed);
  hash.add(args.step);
  if (!args.owner_residuals) hash.add(1);
  const uint32_t value = hash.value();
  return value ? value : 1;
}

}  // namespace

void check(const char* op, const CodedArgs& args, size_t rows) {
  size_t end = 0;
  const auto fail = [op](size_t piece, const std::string& what) {
    throw Error(std::string(op) + ": piece " + std::to_string(piece) + " " + what);
  };
  for (size_t i = 0; i < args.pieces.size; i++) {
    const Piece& p = args.pieces[i];
    if (p.offset != end) {
      fail(i, "starts at " + std::to_string(p.offset) + ", but the one before it ends at " +
                  std::to_string(end) + "; pieces must follow each other without gaps");
    }
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
  const bool one_shot = goes_in_one_shot(args, values, wanted, context.size(), context.speed());
  if (context.is_group()) context.note_algo(one_shot ? "one_shot" : "two_shot");
  const Speed shown_at = one_shot ? Speed() : context.speed();
  const Plan plan =
      all_reduce_plan(args.pieces, values, context.size(), one_shot,
                      coded_segment(context.segment_bytes(), context.speed()),
                      coded_segment(context.segment_bytes(), shown_at), context.shares());
  Channels channels(context, plan);
  return exchange(context, args, args.data.data, channels, plan, divisor);
}

/// Combines what each owner knows, so that all ranks have the same answer.
bool all_agree(CollectiveContext& context, bool finite) {
  uint8_t flag = finite;
  dispatch::run({context, Algo::direct},
                Collective::all_reduce(&flag, 1, {DType::uint8, ReduceOp::min}));
  return flag != 0;
}

// An all-reduce node by node is exact in a node, and the rank at each place codes a shard of the
// sum, in coded all-reduces between the nodes. A node has the role of a rank in the coding: its
// residual lies on the rank that has coded the shard.

/// Ranks of a node wait for each other at each segment, so it has as many values as so many flat
/// ones: 64 MiB as int4 over 1 Gbit/s took 176 ms on two busy cores with 1, 160 with 2, 106 with 4.
constexpr size_t kSegmentsAtOnce = 4;

/// Returns the plan by segments of the rank at a place (coded/nodes.h).
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
      goes_in_one_shot(args, values, wanted, topology.nodes(), context.speed())) {
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
  const bool scatters = op == Op::reduce_scatter;
  const Plan plan = plan_of_rows(args.pieces, context.size(),
                                 coded_segment(context.segment_bytes(), context.speed()), scatters);
  Channels channels(context, plan);
  const bool finite = exchange(context, args, out, channels, plan, scatters ? context.size() : 1);
  return scatters ? all_agree(context, finite) : finite;
}

}  // namespace pycomm::coded
