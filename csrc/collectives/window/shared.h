// Collectives over a Window: all ranks see each other's staging memory, so a byte is written once
// and read in place.
#pragma once
#include "collectives/common/parts.h"
#include "core/deadline.h"
#include "core/op.h"
#include "core/reduce.h"
#include "transports/shm/window.h"
#include "transports/transport.h"

namespace pycomm::shared {

// All ranks of the window's group make the same call with an equal tag; a tag that differs throws
// WireMismatch on every rank. A rank that does not call throws Timeout with its number. Parts are
// of the tag's dtype. Contributions to a premul_sum are scaled already (contribution.h).

PYCOMM_API void all_reduce(Window& window, const OpTag& tag, void* data, Deadline deadline);
/// `out` matters at the root only.
PYCOMM_API void reduce(Window& window, const OpTag& tag, const void* in, void* out,
                       Deadline deadline);
PYCOMM_API void reduce_scatter(Window& window, const OpTag& tag, const ConstParts& in, void* out,
                               Deadline deadline);
PYCOMM_API void all_gather(Window& window, const OpTag& tag, const void* in, const Parts& out,
                           Deadline deadline);
PYCOMM_API void all_to_all(Window& window, const OpTag& tag, const ConstParts& in, const Parts& out,
                           Deadline deadline);
/// tag.numel is this rank's own. `out` matters at the root only.
PYCOMM_API void gather(Window& window, const OpTag& tag, const void* in, const Parts& out,
                       Deadline deadline);
/// tag.numel is this rank's own. `in` matters at the root only.
PYCOMM_API void scatter(Window& window, const OpTag& tag, const ConstParts& in, void* out,
                        Deadline deadline);
PYCOMM_API void broadcast(Window& window, const OpTag& tag, void* data, Deadline deadline);
PYCOMM_API void barrier(Window& window, const OpTag& tag, Deadline deadline);

}  // namespace pycomm::shared
