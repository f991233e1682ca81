// Stream hold: makes a device's stream wait for the host. Work queued after the hold runs once the
// host has written a word, so work that follows a message can be queued before the message arrives.
#pragma once
#include "core/types.h"

namespace pycomm {

/// Queues on `stream` a wait until `*word - value`, as a signed number, is not negative. The word
/// lies in pinned memory that the device reads. Returns false, and queues nothing, if it cannot.
using StreamHold = bool (*)(void* stream, const uint32_t* word, uint32_t value);

/// Returns the hold for CUDA streams, which uses the driver that the first call looks up: no part
/// of CUDA is needed to compile. Null if there is no driver, or one without this function.
PYCOMM_API StreamHold cuda_stream_hold();

/// Exchanges the mode of this thread, which says what it may ask of a device while a thread
/// captures a graph. Modes are those of CUDA; returns 0 if it has done so.
using ExchangeCaptureMode = int (*)(int* mode);

/// Returns that of CUDA, as above.
PYCOMM_API ExchangeCaptureMode cuda_exchange_capture_mode();

}  // namespace pycomm
