// Coded operations over channels.
#include "collectives/algorithms/dispatch.h"
#include "collectives/algorithms/rails.h"
#include "collectives/coded/channels.h"
#include "collectives/coded/coded.h"
#include "collectives/coded/one_shot.h"
#include "collectives/coded/two_shot.h"
#include "core/reduce.h"

namespace pycomm::coded {
namespace {

/// Returns true if the result is finite, of what this rank has decoded.
bool exchange(CollectiveContext& context, const CodedArgs& args, void* out, const Plan& plan,
              int divisor) {
  CoderOptions options;
  options.rank = context.rank();
  options.divisor = divisor;
  options.timing = &context.timing();
  Coder coder(args, out, context.feedback_scratch(), options);
  Channels channels(context, plan);
  TwoShot(channels, coder, plan).run();
  context.wait_all();
  return coder.finite();
}

Plan rows_of(const CollectiveContext& context, const CodedArgs& args, bool scatters) {
  return plan_of_rows(args.pieces, context.size(),
                      coded_segment(context.segment_bytes(), context.speed()), scatters);
}

bool flat(CollectiveContext& context, Algo wanted, const CodedArgs& args, const PieceRuns& values,
          int divisor) {
  const bool one_shot = goes_in_one_shot(args, values, wanted, context.size(), context.speed());
  if (context.is_group()) context.note_algo(one_shot ? "one_shot" : "two_shot");
  const Speed shown_at = one_shot ? Speed() : context.speed();
  const Plan plan =
      all_reduce_plan(args.pieces, values, context.size(), one_shot,
                      coded_segment(context.segment_bytes(), context.speed()),
                      coded_segment(context.segment_bytes(), shown_at), context.coded_shares());
  return exchange(context, args, args.data.data, plan, divisor);
}

/// Combines what each owner knows, so that all ranks have the same answer.
bool all_agree(CollectiveContext& context, bool finite) {
  uint8_t flag = finite;
  dispatch::all_reduce({context, Algo::direct}, &flag, 1, {DType::uint8, ReduceOp::min});
  return flag != 0;
}

// All-reduce node by node: the node's exact sum, of which the rank at each place has a shard; coded
// all-reduces of the shards between the nodes; and an all-gather of the shards in the node. A node
// has the role of a rank in the coding: its residual lies on the rank that has coded the shard.
bool by_nodes(CollectiveContext& context, Algo wanted, const CodedArgs& args,
              const PieceRuns& values) {
  Node node(context);
  const int shards = context.topology().narrowest();
  std::vector<ConstPart> inputs;
  std::vector<Part> outputs;
  auto* place = static_cast<float*>(args.data.data);
  PieceRuns ours;
  for (int p = 0; p < node.size(); p++) {
    const PieceRuns shard = p < shards ? share_of(args.pieces, values, shards, p) : PieceRuns();
    const size_t numel = numel_of({shard.data(), shard.size()});
    inputs.push_back({place, numel});
    outputs.push_back({place, numel});
    if (p == node.place()) ours = shard;
    place += numel;
  }
  void* const own = outputs[node.place()].data;
  node.reduce_scatter(ConstParts(inputs).of(sizeof(float)), own, {DType::float32, ReduceOp::sum});
  if (node.place() < shards) {
    const std::vector<int> members = hierarchical::rail(context.topology(), node.place());
    CollectiveContext rail = context.among(members);
    flat(rail, wanted, args, ours, context.size());
  }
  node.all_gather(own, Parts(outputs).of(sizeof(float)));
  node.end();
  return all_finite({static_cast<float*>(args.data.data), args.data.size});
}

// Widens the buffer: the exact sum of a node is float32 as a whole.
bool by_nodes_wide(CollectiveContext& context, Algo wanted, CodedArgs args,
                   const PieceRuns& values) {
  const Values bucket = args.data;
  const std::unique_ptr<float[]> wide(bucket.dtype == DType::float32 ? nullptr
                                                                     : new float[bucket.size]);
  ConvertArgs widen;
  if (wide) {
    widen.in = bucket.data;
    widen.from = bucket.dtype;
    widen.out = args.data.data = wide.get();
    args.data.dtype = DType::float32;
    widen.numel = bucket.size;
    convert(widen);
  }
  bool finite = by_nodes(context, wanted, args, values);
  if (wide) {
    float found_inf = 0.0f;
    ConvertArgs narrow = widen;
    std::swap(narrow.from, narrow.to);
    narrow.in = wide.get();
    narrow.out = bucket.data;
    narrow.found_inf = &found_inf;
    convert(narrow);
    finite = found_inf == 0.0f;
  }
  return finite;
}

}  // namespace

bool all_reduce(CollectiveContext& context, Algo wanted, const CodedArgs& args) {
  const PieceRuns values = values_of(args.pieces);
  if (dispatch::by_levels(context, wanted)) return by_nodes_wide(context, wanted, args, values);
  return flat(context, wanted, args, values, context.size());
}

bool reduce_scatter(CollectiveContext& context, const CodedArgs& args, void* out) {
  context.note_algo("one_shot");
  const Plan plan = rows_of(context, args, /*scatters=*/true);
  return all_agree(context, exchange(context, args, out, plan, context.size()));
}

bool all_gather(CollectiveContext& context, const CodedArgs& args, void* out) {
  context.note_algo("one_shot");
  const Plan plan = rows_of(context, args, /*scatters=*/false);
  return exchange(context, args, out, plan, 1);
}

}  // namespace pycomm::coded
