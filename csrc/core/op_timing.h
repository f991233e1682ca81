// OpTiming: time that one operation spent in its stages, recorded by its thread. All in ticks().
#pragma once
#include "core/clock.h"

namespace pycomm {

struct OpTiming {
  uint64_t waited = 0;  ///< only waiting for other ranks
  uint64_t coded = 0;   ///< encoding and decoding
};

/// Traffic to one rank over the network, since the start.
struct LinkUse {
  uint64_t bytes = 0;    ///< that the rank has acknowledged
  uint64_t busy_us = 0;  ///< while there was data to send, and the rank accepted it
};

}  // namespace pycomm
