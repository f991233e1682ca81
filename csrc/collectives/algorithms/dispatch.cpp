#include "collectives/algorithms/dispatch.h"

#include <cmath>

#include "collectives/algorithms/algorithms.h"
#include "collectives/window/shared.h"
#include "core/env.h"
#include "core/error.h"

namespace pycomm::dispatch {
namespace {

// The terms of costs: n ranks, b bytes, l = ceil(log2 n) rounds that double.
struct Terms {
  double n, b, l;

  explicit Terms(const Workload& call) : n(call.ranks), b(static_cast<double>(call.bytes)) {
    for (l = 0; std::exp2(l) < n; l++) continue;
  }
  double others() const { return n - 1; }
  double share() const { return b / n; }  // of one rank
};

struct Algorithm {
  Op op;
  Algo algo;
  void (*run)(CollectiveContext& context, const Collective& call);
  Cost (*cost)(const Terms& t) = nullptr;  ///< null: it is not chosen by its cost
};

// Of the algorithms of a reduction all but ring sum in rank order, and ring is never the cheapest:
// others send its bytes in fewer rounds.
constexpr Algorithm kAlgorithms[] = {
    {Op::all_reduce, Algo::hierarchical, hierarchical::all_reduce},
    {Op::all_reduce, Algo::one_shot, direct::one_shot_reduce,
     [](const Terms& t) -> Cost { return {1, t.others(), t.others() * t.b, t.n * t.b}; }},
    {Op::all_reduce, Algo::two_shot, direct::two_shot_reduce,
     [](const Terms& t) -> Cost { return {2, 2 * t.others(), 2 * t.others() * t.share(), t.b}; }},
    {Op::all_reduce, Algo::bruck, bruck::all_reduce,
     [](const Terms& t) -> Cost { return {t.l, t.l, t.others() * t.b, (t.n + 1) * t.b}; }},
    {Op::all_reduce, Algo::ring, ring::all_reduce,
     [](const Terms& t) -> Cost {
       return {2 * t.others(), 2 * t.others(), 2 * t.others() * t.share(),
               2 * t.others() * t.share()};
     }},

    {Op::reduce_scatter, Algo::hierarchical, hierarchical::reduce_scatter},
    {Op::reduce_scatter, Algo::one_shot, direct::reduce_scatter,
     [](const Terms& t) -> Cost { return {1, t.others(), t.others() * t.share(), t.b}; }},
    {Op::reduce_scatter, Algo::ring, ring::reduce_scatter,
     [](const Terms& t) -> Cost {
       return {t.others(), t.others(), t.others() * t.share(), 3 * t.b};
     }},

    {Op::all_gather, Algo::hierarchical, hierarchical::all_gather},
    {Op::all_gather, Algo::one_shot, direct::exchange,
     [](const Terms& t) -> Cost { return {1, t.others(), t.others() * t.share(), 0}; }},
    {Op::all_gather, Algo::bruck, bruck::all_gather,
     [](const Terms& t) -> Cost { return {t.l, t.l, t.others() * t.share(), 2 * t.b}; }},
    {Op::all_gather, Algo::ring, ring::all_gather,
     [](const Terms& t) -> Cost { return {t.others(), t.others(), t.others() * t.share(), 0}; }},

    {Op::broadcast, Algo::hierarchical, hierarchical::broadcast},
    {Op::broadcast, Algo::one_shot, direct::exchange,
     [](const Terms& t) -> Cost { return {1, t.others(), t.others() * t.b, 0}; }},
    {Op::broadcast, Algo::two_shot, direct::two_shot_broadcast,
     [](const Terms& t) -> Cost { return {2, 2 * t.others(), 2 * t.others() * t.share(), 0}; }},
    {Op::broadcast, Algo::tree, tree::broadcast,
     [](const Terms& t) -> Cost { return {t.l, t.l, t.l * t.b, 0}; }},

    {Op::reduce, Algo::hierarchical, hierarchical::reduce},
    {Op::reduce, Algo::one_shot, direct::one_shot_reduce,
     [](const Terms& t) -> Cost { return {1, t.others(), t.others() * t.b, t.n * t.b}; }},
    {Op::reduce, Algo::two_shot, direct::two_shot_reduce,
     [](const Terms& t) -> Cost { return {2, 2 * t.others(), 2 * t.others() * t.share(), t.b}; }},

    {Op::barrier, Algo::hierarchical, hierarchical::barrier},
    {Op::barrier, Algo::one_shot, direct::exchange,
     [](const Terms& t) -> Cost { return {1, t.others(), 0, 0}; }},
    {Op::barrier, Algo::bruck, bruck::barrier,
     [](const Terms& t) -> Cost { return {t.l, t.l, 0, 0}; }},

    {Op::all_to_all, Algo::one_shot, direct::exchange},
    {Op::gather, Algo::one_shot, direct::exchange},
    {Op::scatter, Algo::one_shot, direct::exchange},
};

/// Returns null if the op has no such algorithm.
const Algorithm* find(Op op, Algo algo) {
  for (const Algorithm& each : kAlgorithms) {
    if (each.op == op && each.algo == algo) return &each;
  }
  return nullptr;
}

bool matches(Algo wanted, Algo algo) {
  if (wanted == Algo::direct) return algo == Algo::one_shot || algo == Algo::two_shot;
  return wanted == algo;
}

/// Returns the seconds that a call takes.
double time_of(const Algorithm& algorithm, const Workload& call, const Terms& terms) {
  Cost cost = algorithm.cost(terms);
  if (call.op == Op::all_reduce && algorithm.algo == Algo::two_shot && call.speed.shared > 0) {
    cost.sent = std::min(cost.sent, call.speed.shared * terms.b);
  }
  return seconds(cost, call.medium, call.speed);
}

/// Returns the cheapest algorithm that allowed(algo) accepts; null if there is none.
template <typename Allowed>
const Algorithm* cheapest(const Workload& call, const Allowed& allowed) {
  const Terms terms(call);
  const Algorithm* best = nullptr;
  double least = 0;
  for (const Algorithm& each : kAlgorithms) {
    if (each.op != call.op || !each.cost || !allowed(each.algo)) continue;
    const double time = time_of(each, call, terms);
    if (best && time >= least) continue;
    best = &each;
    least = time;
  }
  return best;
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

Cost cost(const Workload& call, Algo algo) {
  const Algorithm* found = find(call.op, algo);
  if (found && found->cost) return found->cost(Terms(call));
  throw Error(std::string(name(call.op)) + " has no algorithm " +
              kAlgoNames[static_cast<size_t>(algo)]);
}

Algo select(const Workload& call, Algo wanted) {
  const Algorithm* found = cheapest(call, [&](Algo algo) { return matches(wanted, algo); });
  if (!found) found = cheapest(call, [](Algo) { return true; });
  return found ? found->algo : Algo::one_shot;
}

std::string explain(const Workload& call, Algo wanted) {
  const Algo taken = select(call, wanted);
  const Terms terms(call);
  std::string first, others;
  for (const Algorithm& each : kAlgorithms) {
    if (each.op != call.op || !each.cost) continue;
    const std::string text = std::string(kAlgoNames[static_cast<size_t>(each.algo)]) + " " +
                             time_text(time_of(each, call, terms));
    if (each.algo == taken) {
      first = text;
    } else {
      others += (others.empty() ? "" : ", ") + text;
    }
  }
  if (first.empty()) return "one_shot, its only algorithm";
  return first + (others.empty() ? "" : " (" + others + ")");
}

bool by_levels(CollectiveContext& context, Algo wanted) {
  const bool levels = context.is_group() && goes_by_levels(context.topology(), wanted);
  if (levels) context.note_algo("hierarchical");
  return levels;
}

void run(const Route& route, const Collective& call) {
  if (route.window) return shared::run(*route.window, route.tag, call, route.deadline);
  const Algorithm* algorithm = find(call.op, Algo::hierarchical);
  if (!algorithm || !by_levels(*route.context, route.wanted)) {
    algorithm = find(call.op, choose(route, call));
  }
  algorithm->run(*route.context, call);
}

}  // namespace pycomm::dispatch
