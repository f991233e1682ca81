#include "collectives/dispatch.h"

#include "collectives/bruck.h"
#include "collectives/direct.h"
#include "collectives/halving_doubling.h"
#include "collectives/hierarchical.h"
#include "collectives/ring.h"
#include "collectives/tree.h"
#include "core/env.h"

namespace pycomm::dispatch {
namespace {

Algo choose(Exchange& ex, Algo wanted, Op op, size_t bytes, bool order_free = false) {
  if (ex.size() == 1) return Algo::one_shot;
  const Algo algo = select({op, ex.size(), bytes, order_free, ex.medium()}, wanted);
  if (ex.is_group()) ex.note_algo(kAlgoNames[static_cast<size_t>(algo)]);
  return algo;
}

}  // namespace

bool by_levels(Exchange& ex, Algo wanted) {
  const bool levels = ex.is_group() && goes_by_levels(ex.topology(), wanted);
  if (levels) ex.note_algo("hierarchical");
  return levels;
}

void all_reduce(Exchange& ex, Algo wanted, void* data, size_t numel, const Fold& fold) {
  if (by_levels(ex, wanted)) return hierarchical::all_reduce(ex, data, numel, fold);
  switch (choose(ex, wanted, Op::all_reduce, numel * size_of(fold.dtype),
                 is_order_free(fold.dtype, fold.op))) {
    case Algo::two_shot:
      return direct::two_shot_all_reduce(ex, data, numel, fold);
    case Algo::bruck:
      return bruck::all_reduce(ex, data, numel, fold);
    case Algo::halving_doubling:
      return halving_doubling::all_reduce(ex, data, numel, fold);
    case Algo::ring:
      return ring::all_reduce(ex, data, numel, fold);
    default:
      return direct::one_shot_all_reduce(ex, data, numel, fold);
  }
}

void reduce_scatter(Exchange& ex, Algo wanted, const ConstParts& in, void* out, const Fold& fold) {
  if (by_levels(ex, wanted)) return hierarchical::reduce_scatter(ex, in, out, fold);
  switch (choose(ex, wanted, Op::reduce_scatter, in.total(ex.size()) * size_of(fold.dtype),
                 is_order_free(fold.dtype, fold.op))) {
    case Algo::halving_doubling:
      return halving_doubling::reduce_scatter(ex, in, out, fold);
    case Algo::ring:
      return ring::reduce_scatter(ex, in, out, fold);
    default:
      return direct::reduce_scatter(ex, in, out, fold);
  }
}

void reduce(Exchange& ex, Algo wanted, const void* in, void* out, size_t numel, const Fold& fold,
            int root) {
  if (by_levels(ex, wanted)) return hierarchical::reduce(ex, in, out, numel, fold, root);
  switch (choose(ex, wanted, Op::reduce, numel * size_of(fold.dtype),
                 is_order_free(fold.dtype, fold.op))) {
    case Algo::two_shot:
      return direct::two_shot_reduce(ex, in, out, numel, fold, root);
    case Algo::tree:
      return tree::reduce(ex, in, out, numel, fold, root);
    default:
      return direct::one_shot_reduce(ex, in, out, numel, fold, root);
  }
}

void all_gather(Exchange& ex, Algo wanted, const void* in, const Parts& out) {
  if (by_levels(ex, wanted)) return hierarchical::all_gather(ex, in, out);
  size_t bytes = 0;
  for (int r = 0; r < ex.size(); r++) bytes += out.bytes(r);
  switch (choose(ex, wanted, Op::all_gather, bytes)) {
    case Algo::bruck:
      return bruck::all_gather(ex, in, out);
    case Algo::halving_doubling:
      return halving_doubling::all_gather(ex, in, out);
    case Algo::ring:
      return ring::all_gather(ex, in, out);
    default:
      return direct::all_gather(ex, in, out);
  }
}

void broadcast(Exchange& ex, Algo wanted, void* data, size_t bytes, int root) {
  if (by_levels(ex, wanted)) return hierarchical::broadcast(ex, data, bytes, root);
  switch (choose(ex, wanted, Op::broadcast, bytes)) {
    case Algo::two_shot:
      return direct::two_shot_broadcast(ex, data, bytes, root);
    case Algo::tree:
      return tree::broadcast(ex, data, bytes, root);
    default:
      return direct::one_shot_broadcast(ex, data, bytes, root);
  }
}

void barrier(Exchange& ex, Algo wanted) {
  if (by_levels(ex, wanted)) return hierarchical::barrier(ex);
  if (choose(ex, wanted, Op::barrier, 0) == Algo::bruck) return bruck::barrier(ex);
  direct::barrier(ex);
}

}  // namespace pycomm::dispatch
