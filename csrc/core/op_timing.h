// OpTiming: time that one operation spent in its stages, recorded by its thread. All in ticks().
#pragma once
#include "core/clock.h"

namespace pycomm {

struct OpTiming {
  uint64_t waited = 0;  ///< only waiting for other ranks
  uint64_t coded = 0;   ///< encoding and decoding
  int last = -1;        ///< rank whose bytes ended the longest single wait; -1: there was none
  uint64_t longest = 0;

  /// Records the end of a wait for a rank that began at `since`.
  void wait_ended(uint64_t since, int rank) {
    const uint64_t ticks_waited = ticks() - since;
    waited += ticks_waited;
    if (ticks_waited <= longest) return;
    longest = ticks_waited;
    last = rank;
  }
};

/// Traffic to one rank over the network, since the start.
struct LinkUse {
  uint64_t bytes = 0;    ///< that the rank has acknowledged
  uint64_t busy_us = 0;  ///< while there was data to send, and the rank accepted it
};

}  // namespace pycomm
