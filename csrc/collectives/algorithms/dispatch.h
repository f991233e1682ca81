// Dispatch of collectives: picks the algorithm of a call and runs it. Buffers and ranks have been
// checked. Every choice is a function of arguments that are equal on all ranks.
#pragma once
#include "collectives/algorithms/context.h"
#include "collectives/common/collective.h"
#include "collectives/common/cost.h"

namespace pycomm::dispatch {

/// Where a call runs: in memory that all its ranks share, or over channels by the algorithm
/// `wanted`.
struct Route {
  Route(Window& window, const OpTag& tag, const Deadline& deadline)
      : window(&window), tag(tag), deadline(deadline) {}
  Route(CollectiveContext& context, Algo wanted)
      : context(&context), wanted(wanted), tag(context.tag()), deadline(context.deadline()) {}

  Window* window = nullptr;
  CollectiveContext* context = nullptr;  ///< if there is no window
  Algo wanted = Algo::automatic;
  const OpTag& tag;  ///< of a window: as shared.h wants it
  Deadline deadline;
};

/// Throws Error if `algo` is no algorithm of the op that has a cost.
PYCOMM_API Cost cost(const Workload& call, Algo algo);
/// Returns the algorithm between equal ranks: never automatic, flat, direct or hierarchical.
/// `wanted` is used if the op has it, whatever the order of its sums; else the cheapest one is
/// chosen that keeps rank order.
PYCOMM_API Algo select(const Workload& call, Algo wanted);
/// Returns what select() takes and what each algorithm costs, in words: "bruck 31 us (one_shot 47
/// us, ring 94 us)".
std::string explain(const Workload& call, Algo wanted);

/// True if the group goes node by node; records that in the trace.
bool by_levels(CollectiveContext& context, Algo wanted);

/// Runs a call whose parts know the bytes of their elements.
void run(const Route& route, const Collective& call);

}  // namespace pycomm::dispatch
