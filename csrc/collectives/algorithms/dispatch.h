// Dispatch of collectives over channels: picks the algorithm of a call and runs it. Buffers and
// ranks have been checked.
#pragma once
#include "collectives/algorithms/context.h"
#include "collectives/common/fold.h"
#include "collectives/common/parts.h"
#include "collectives/common/select.h"

namespace pycomm::dispatch {

// `wanted` is the group's algorithm. Parts know the bytes of their elements.

/// True if the group goes node by node; records that in the trace.
bool by_levels(CollectiveContext& context, Algo wanted);

void all_reduce(CollectiveContext& context, Algo wanted, void* data, size_t numel,
                const Fold& fold);
void reduce_scatter(CollectiveContext& context, Algo wanted, const ConstParts& in, void* out,
                    const Fold& fold);
void reduce(CollectiveContext& context, Algo wanted, const void* in, void* out, size_t numel,
            const Fold& fold, int root);
void all_gather(CollectiveContext& context, Algo wanted, const void* in, const Parts& out);
void broadcast(CollectiveContext& context, Algo wanted, void* data, size_t bytes, int root);
void barrier(CollectiveContext& context, Algo wanted);

}  // namespace pycomm::dispatch
