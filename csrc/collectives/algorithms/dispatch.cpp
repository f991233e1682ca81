#include "collectives/algorithms/dispatch.h"

#include "collectives/algorithms/bruck.h"
#include "collectives/algorithms/direct.h"
#include "collectives/algorithms/hierarchical.h"
#include "collectives/algorithms/ring.h"
#include "collectives/algorithms/tree.h"
#include "core/env.h"

namespace pycomm::dispatch {
namespace {

Algo choose(CollectiveContext& context, Algo wanted, Op op, size_t bytes) {
  if (context.size() == 1) return Algo::one_shot;
  const Algo algo = select({op, context.size(), bytes, context.medium(), context.speed()}, wanted);
  if (context.is_group()) context.note_algo(kAlgoNames[static_cast<size_t>(algo)]);
  return algo;
}

}  // namespace

bool by_levels(CollectiveContext& context, Algo wanted) {
  const bool levels = context.is_group() && goes_by_levels(context.topology(), wanted);
  if (levels) context.note_algo("hierarchical");
  return levels;
}

void all_reduce(CollectiveContext& context, Algo wanted, void* data, size_t numel,
                const Fold& fold) {
  if (by_levels(context, wanted)) return hierarchical::all_reduce(context, data, numel, fold);
  switch (choose(context, wanted, Op::all_reduce, numel * size_of(fold.dtype))) {
    case Algo::two_shot:
      return direct::two_shot_all_reduce(context, data, numel, fold);
    case Algo::bruck:
      return bruck::all_reduce(context, data, numel, fold);
    case Algo::ring:
      return ring::all_reduce(context, data, numel, fold);
    default:
      return direct::one_shot_all_reduce(context, data, numel, fold);
  }
}

void reduce_scatter(CollectiveContext& context, Algo wanted, const ConstParts& in, void* out,
                    const Fold& fold) {
  if (by_levels(context, wanted)) return hierarchical::reduce_scatter(context, in, out, fold);
  switch (
      choose(context, wanted, Op::reduce_scatter, in.total(context.size()) * size_of(fold.dtype))) {
    case Algo::ring:
      return ring::reduce_scatter(context, in, out, fold);
    default:
      return direct::reduce_scatter(context, in, out, fold);
  }
}

void reduce(CollectiveContext& context, Algo wanted, const void* in, void* out, size_t numel,
            const Fold& fold, int root) {
  if (by_levels(context, wanted)) return hierarchical::reduce(context, in, out, numel, fold, root);
  switch (choose(context, wanted, Op::reduce, numel * size_of(fold.dtype))) {
    case Algo::two_shot:
      return direct::two_shot_reduce(context, in, out, numel, fold, root);
    case Algo::tree:
      return tree::reduce(context, in, out, numel, fold, root);
    default:
      return direct::one_shot_reduce(context, in, out, numel, fold, root);
  }
}

void all_gather(CollectiveContext& context, Algo wanted, const void* in, const Parts& out) {
  if (by_levels(context, wanted)) return hierarchical::all_gather(context, in, out);
  size_t bytes = 0;
  for (int r = 0; r < context.size(); r++) bytes += out.bytes(r);
  switch (choose(context, wanted, Op::all_gather, bytes)) {
    case Algo::bruck:
      return bruck::all_gather(context, in, out);
    case Algo::ring:
      return ring::all_gather(context, in, out);
    default:
      return direct::all_gather(context, in, out);
  }
}

void broadcast(CollectiveContext& context, Algo wanted, void* data, size_t bytes, int root) {
  if (by_levels(context, wanted)) return hierarchical::broadcast(context, data, bytes, root);
  switch (choose(context, wanted, Op::broadcast, bytes)) {
    case Algo::two_shot:
      return direct::two_shot_broadcast(context, data, bytes, root);
    case Algo::tree:
      return tree::broadcast(context, data, bytes, root);
    default:
      return direct::one_shot_broadcast(context, data, bytes, root);
  }
}

void barrier(CollectiveContext& context, Algo wanted) {
  if (by_levels(context, wanted)) return hierarchical::barrier(context);
  if (choose(context, wanted, Op::barrier, 0) == Algo::bruck) return bruck::barrier(context);
  direct::barrier(context);
}

}  // namespace pycomm::dispatch
