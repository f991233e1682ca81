// The collectives over channels: picks the algorithm of a call and runs it. Buffers and ranks have
// been checked.
#pragma once
#include "collectives/exchange.h"
#include "collectives/fold.h"
#include "collectives/parts.h"
#include "collectives/select.h"

namespace pycomm::dispatch {

// `wanted` is the group's. Parts know the bytes of their elements.

/// Whether the group goes node by node, and says so in the trace.
bool by_levels(Exchange& ex, Algo wanted);

void all_reduce(Exchange& ex, Algo wanted, void* data, size_t numel, const Fold& fold);
void reduce_scatter(Exchange& ex, Algo wanted, const ConstParts& in, void* out, const Fold& fold);
void reduce(Exchange& ex, Algo wanted, const void* in, void* out, size_t numel, const Fold& fold,
            int root);
void all_gather(Exchange& ex, Algo wanted, const void* in, const Parts& out);
void broadcast(Exchange& ex, Algo wanted, void* data, size_t bytes, int root);
void barrier(Exchange& ex, Algo wanted);

}  // namespace pycomm::dispatch
