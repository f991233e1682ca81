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

Algo choose(const Route& route, Op op, size_t bytes) {
  CollectiveContext& context = *route.context;
  if (context.size() == 1) return Algo::one_shot;
  const Algo algo =
      select({op, context.size(), bytes, context.medium(), context.speed()}, route.wanted);
  if (context.is_group()) context.note_algo(kAlgoNames[static_cast<size_t>(algo)]);
  return algo;
}

}  // namespace

bool by_levels(CollectiveContext& context, Algo wanted) {
  const bool levels = context.is_group() && goes_by_levels(context.topology(), wanted);
  if (levels) context.note_algo("hierarchical");
  return levels;
}

void all_reduce(const Route& route, void* data, size_t numel, const Fold& fold) {
  if (route.window) return shared::all_reduce(*route.window, route.tag, data, route.deadline);
  CollectiveContext& context = *route.context;
  if (by_levels(context, route.wanted)) return hierarchical::all_reduce(context, data, numel, fold);
  switch (choose(route, Op::all_reduce, numel * size_of(fold.dtype))) {
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

void reduce_scatter(const Route& route, const ConstParts& in, void* out, const Fold& fold) {
  if (route.window)
    return shared::reduce_scatter(*route.window, route.tag, in, out, route.deadline);
  CollectiveContext& context = *route.context;
  if (by_levels(context, route.wanted)) return hierarchical::reduce_scatter(context, in, out, fold);
  const size_t bytes = in.total(context.size()) * size_of(fold.dtype);
  if (choose(route, Op::reduce_scatter, bytes) == Algo::ring) {
    return ring::reduce_scatter(context, in, out, fold);
  }
  direct::reduce_scatter(context, in, out, fold);
}

void reduce(const Route& route, const void* in, void* out, size_t numel, const Fold& fold,
            int root) {
  if (route.window) return shared::reduce(*route.window, route.tag, in, out, route.deadline);
  CollectiveContext& context = *route.context;
  if (by_levels(context, route.wanted)) {
    return hierarchical::reduce(context, in, out, numel, fold, root);
  }
  switch (choose(route, Op::reduce, numel * size_of(fold.dtype))) {
    case Algo::two_shot:
      return direct::two_shot_reduce(context, in, out, numel, fold, root);
    case Algo::tree:
      return tree::reduce(context, in, out, numel, fold, root);
    default:
      return direct::one_shot_reduce(context, in, out, numel, fold, root);
  }
}

void all_gather(const Route& route, const void* in, const Parts& out) {
  if (route.window) return shared::all_gather(*route.window, route.tag, in, out, route.deadline);
  CollectiveContext& context = *route.context;
  if (by_levels(context, route.wanted)) return hierarchical::all_gather(context, in, out);
  size_t bytes = 0;
  for (int r = 0; r < context.size(); r++) bytes += out.bytes(r);
  switch (choose(route, Op::all_gather, bytes)) {
    case Algo::bruck:
      return bruck::all_gather(context, in, out);
    case Algo::ring:
      return ring::all_gather(context, in, out);
    default:
      return direct::all_gather(context, in, out);
  }
}

void all_to_all(const Route& route, const ConstParts& in, const Parts& out) {
  if (route.window) return shared::all_to_all(*route.window, route.tag, in, out, route.deadline);
  direct::all_to_all(*route.context, in, out);
}

void broadcast(const Route& route, void* data, size_t bytes, int root) {
  if (route.window) return shared::broadcast(*route.window, route.tag, data, route.deadline);
  CollectiveContext& context = *route.context;
  if (by_levels(context, route.wanted)) return hierarchical::broadcast(context, data, bytes, root);
  switch (choose(route, Op::broadcast, bytes)) {
    case Algo::two_shot:
      return direct::two_shot_broadcast(context, data, bytes, root);
    case Algo::tree:
      return tree::broadcast(context, data, bytes, root);
    default:
      return direct::one_shot_broadcast(context, data, bytes, root);
  }
}

void gather(const Route& route, const void* in, size_t bytes, const Parts& out, int root) {
  if (route.window) return shared::gather(*route.window, route.tag, in, out, route.deadline);
  direct::gather(*route.context, in, bytes, out, root);
}

void scatter(const Route& route, const ConstParts& in, void* out, size_t bytes, int root) {
  if (route.window) return shared::scatter(*route.window, route.tag, in, out, route.deadline);
  direct::scatter(*route.context, in, out, bytes, root);
}

void barrier(const Route& route) {
  if (route.window) return shared::barrier(*route.window, route.tag, route.deadline);
  CollectiveContext& context = *route.context;
  if (by_levels(context, route.wanted)) return hierarchical::barrier(context);
  if (choose(route, Op::barrier, 0) == Algo::bruck) return bruck::barrier(context);
  direct::barrier(context);
}

}  // namespace pycomm::dispatch
