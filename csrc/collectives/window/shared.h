// Collectives over a Window: all ranks see each other's staging memory, so a byte is written once
// and read in place.
#pragma once
#include "collectives/common/collective.h"
#include "core/deadline.h"
#include "transports/shm/window.h"

namespace pycomm::shared {

/// Runs a call whose parts know the bytes of their elements. All ranks of the window's group make
/// it with an equal tag; a tag that differs throws WireMismatch on every rank. A rank that does not
/// call throws Timeout with its number. Contributions to a premul_sum are scaled already.
PYCOMM_API void run(Window& window, const OpTag& tag, const Collective& call, Deadline deadline);

}  // namespace pycomm::shared
