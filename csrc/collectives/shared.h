// Collectives over a Window: all ranks see each other's staging memory, so a byte is written once
// and read where it lies.
#pragma once
#include "core/deadline.h"
#include "core/op.h"
#include "core/reduce.h"
#include "transports/transport.h"
#include "transports/window.h"

namespace pycomm::shared {

// All ranks of the window's group call the same one with an equal tag; a tag that differs throws
// WireMismatch on every rank. A rank that does not come throws Timeout with its number.

PYCOMM_API void all_reduce(Window& window, const OpTag& tag, void* data, double factor,
                           Deadline deadline);
/// tag.numel counts the elements of one part.
PYCOMM_API void reduce_scatter(Window& window, const OpTag& tag, const void* in, void* out,
                               double factor, Deadline deadline);
PYCOMM_API void all_gather(Window& window, const OpTag& tag, const void* in, void* out,
                           Deadline deadline);
PYCOMM_API void broadcast(Window& window, const OpTag& tag, void* data, Deadline deadline);
PYCOMM_API void barrier(Window& window, const OpTag& tag, Deadline deadline);

}  // namespace pycomm::shared
