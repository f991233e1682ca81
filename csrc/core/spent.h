// Where the time of one operation went, as its thread notes it. All in ticks().
#pragma once
#include "core/clock.h"

namespace pycomm {

struct Spent {
  uint64_t waited = 0;  ///< with nothing to do but to wait for other ranks
  uint64_t coded = 0;   ///< encoding and decoding
  int last = -1;        ///< whose bytes ended the longest single wait; -1: there was none
  uint64_t longest = 0;

  /// A wait for a rank is over that began at `since`.
  void wait_ended(uint64_t since, int rank) {
    const uint64_t ticks_waited = ticks() - since;
    waited += ticks_waited;
    if (ticks_waited <= longest) return;
    longest = ticks_waited;
    last = rank;
  }
};

/// What has gone to one rank by the network, since the start.
struct LinkUse {
  uint64_t bytes = 0;    ///< that it has acknowledged
  uint64_t busy_us = 0;  ///< while there was something to carry, and the rank took it
};

}  // namespace pycomm
