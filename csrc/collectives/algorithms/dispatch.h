// Dispatch of collectives: picks the algorithm of a call and runs it. Buffers and ranks have been
// checked.
#pragma once
#include "collectives/algorithms/context.h"
#include "collectives/common/fold.h"
#include "collectives/common/parts.h"
#include "collectives/common/select.h"

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

/// True if the group goes node by node; records that in the trace.
bool by_levels(CollectiveContext& context, Algo wanted);

// Parts know the bytes of their elements.

void all_reduce(const Route& route, void* data, size_t numel, const Fold& fold);
void reduce_scatter(const Route& route, const ConstParts& in, void* out, const Fold& fold);
void reduce(const Route& route, const void* in, void* out, size_t numel, const Fold& fold,
            int root);
void all_gather(const Route& route, const void* in, const Parts& out);
void all_to_all(const Route& route, const ConstParts& in, const Parts& out);
void broadcast(const Route& route, void* data, size_t bytes, int root);
void gather(const Route& route, const void* in, size_t bytes, const Parts& out, int root);
void scatter(const Route& route, const ConstParts& in, void* out, size_t bytes, int root);
void barrier(const Route& route);

}  // namespace pycomm::dispatch
