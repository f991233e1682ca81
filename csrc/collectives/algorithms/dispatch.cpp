#include "collectives/algorithms/dispatch.h"

#include "collectives/algorithms/bruck.h"
#include "collectives/algorithms/direct.h"
#include "collectives/algorithms/hierarchical.h"
#include "collectives/algorithms/ring.h"
#include "collectives/algorithms/tree.h"
#include "collectives/window/shared.h"
#include "core/env.h"

namespace pycomm::dispatch {
namespace {

using Run = void (*)(CollectiveContext& context, const Collective& call);

struct Algorithm {
  Op op;
  Algo algo;
  Run run;
};

// What select() may choose (common/select.cpp has the costs), and what goes node by node.
constexpr Algorithm kTable[] = {
    {Op::all_reduce, Algo::hierarchical, hierarchical::all_reduce},
    {Op::all_reduce, Algo::one_shot, direct::one_shot_reduce},
    {Op::all_reduce, Algo::two_shot, direct::two_shot_reduce},
    {Op::all_reduce, Algo::bruck, bruck::all_reduce},
    {Op::all_reduce, Algo::ring, ring::all_reduce},
    {Op::reduce_scatter, Algo::hierarchical, hierarchical::reduce_scatter},
    {Op::reduce_scatter, Algo::one_shot, direct::reduce_scatter},
    {Op::reduce_scatter, Algo::ring, ring::reduce_scatter},
    {Op::all_gather, Algo::hierarchical, hierarchical::all_gather},
    {Op::all_gather, Algo::one_shot, direct::exchange},
    {Op::all_gather, Algo::bruck, bruck::all_gather},
    {Op::all_gather, Algo::ring, ring::all_gather},
    {Op::all_to_all, Algo::one_shot, direct::exchange},
    {Op::broadcast, Algo::hierarchical, hierarchical::broadcast},
    {Op::broadcast, Algo::one_shot, direct::exchange},
    {Op::broadcast, Algo::two_shot, direct::two_shot_broadcast},
    {Op::broadcast, Algo::tree, tree::broadcast},
    {Op::reduce, Algo::hierarchical, hierarchical::reduce},
    {Op::reduce, Algo::one_shot, direct::one_shot_reduce},
    {Op::reduce, Algo::two_shot, direct::two_shot_reduce},
    {Op::reduce, Algo::tree, tree::reduce},
    {Op::gather, Algo::one_shot, direct::exchange},
    {Op::scatter, Algo::one_shot, direct::exchange},
    {Op::barrier, Algo::hierarchical, hierarchical::barrier},
    {Op::barrier, Algo::one_shot, direct::exchange},
    {Op::barrier, Algo::bruck, bruck::barrier},
};

/// Returns null if the op has no such algorithm.
Run find(Op op, Algo algo) {
  for (const Algorithm& each : kTable) {
    if (each.op == op && each.algo == algo) return each.run;
  }
  return nullptr;
}

Algo choose(const Route& route, const Collective& call) {
  CollectiveContext& context = *route.context;
  const int ranks = context.size();
  if (ranks == 1) return Algo::one_shot;
  const Algo algo =
      select({call.op, ranks, call.bytes(ranks), context.medium(), context.speed()}, route.wanted);
  if (context.is_group()) context.note_algo(kAlgoNames[static_cast<size_t>(algo)]);
  return algo;
}

}  // namespace

bool by_levels(CollectiveContext& context, Algo wanted) {
  const bool levels = context.is_group() && goes_by_levels(context.topology(), wanted);
  if (levels) context.note_algo("hierarchical");
  return levels;
}

void run(const Route& route, const Collective& call) {
  if (route.window) return shared::run(*route.window, route.tag, call, route.deadline);
  const Run by_nodes = find(call.op, Algo::hierarchical);
  if (by_nodes && by_levels(*route.context, route.wanted)) return by_nodes(*route.context, call);
  find(call.op, choose(route, call))(*route.context, call);
}

}  // namespace pycomm::dispatch
