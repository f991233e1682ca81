// Makes a device's stream wait for the host: what is queued behind the hold runs once the host has
// written a word. So work that follows a message can be queued before the message has come.
#pragma once
#include "core/types.h"

namespace pycomm {

/// Queues on `stream` that it waits until `*word - value`, as a signed number, is not negative. The
/// word lies in pinned memory that the device reads. Returns false, and queues nothing, if it
/// cannot.
using StreamHold = bool (*)(void* stream, const uint32_t* word, uint32_t value);

/// For streams of CUDA, by its driver, which this looks for at the first call: no part of CUDA is
/// needed to compile. Null where there is no driver, or one that cannot.
PYCOMM_API StreamHold cuda_stream_hold();

}  // namespace pycomm
