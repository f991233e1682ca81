// How a wait on shared memory passes its time: it looks, then yields, then sleeps.
//
// A look costs nothing and finds a peer on another core within 0.1 us; a yield lets a peer run that
// shares our core; a sleep costs its waker some 60 us, so it begins when the wait is long anyway.
#pragma once
#include <sched.h>

#include "transports/segment.h"

namespace pycomm {

constexpr auto kYieldFor = std::chrono::microseconds(500);
constexpr auto kSleepAtMost = std::chrono::microseconds(2000);

/// Looks before the first yield. Ranks that share cores must not look: whom they wait for may be
/// waiting for the core.
inline int looks(const Segment& segment, int wanted) {
  if (wanted >= 0) return wanted;
  return segment.ranks() > segment.cpus() ? 4 : 2000;
}

/// Until `ready()`. `patrol()` throws what ends the wait; `sleep(limit)` returns early when there
/// is news.
template <typename Ready, typename Patrol, typename Sleep>
void wait_until(int spin, Ready ready, Patrol patrol, Sleep sleep) {
  for (int i = 0; i < spin; i++) {
    if (ready()) return;
    cpu_relax();
  }
  const auto yield_end = Deadline::Clock::now() + kYieldFor;
  for (bool yields = true; !ready();) {
    patrol();
    if (yields) {
      ::sched_yield();
      yields = Deadline::Clock::now() < yield_end;
    } else {
      sleep(kSleepAtMost);
    }
  }
}

}  // namespace pycomm
