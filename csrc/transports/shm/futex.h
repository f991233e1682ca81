// Primitives of waits on shared memory: the pause between two polls, and sleep by futex.
#pragma once
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <ctime>

#include "core/types.h"

namespace pycomm {

inline void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");  // "yield" does nothing on most cores
#endif
}

/// Sleeps while `word` holds `seen`, at most for `limit`; may return early. Works between processes
/// too.
inline void futex_wait(const void* word, uint32_t seen, std::chrono::microseconds limit) {
  const auto us = limit.count();
  const timespec time{static_cast<time_t>(us / 1000000), static_cast<long>(us % 1000000 * 1000)};
  ::syscall(SYS_futex, word, FUTEX_WAIT, seen, &time, nullptr, 0);
}

inline void futex_wake(const void* word) {
  ::syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

/// A doorbell: a place to sleep until another rank rings. Ringing costs one load while no rank
/// sleeps.
///
/// There is no fence between the ringer's earlier writes and its load of `asleep`, since that would
/// cost every message 50 ns or more. So a ring may be missed if it falls into the few nanoseconds
/// before the sleeper's mark arrives; therefore all sleeps are short.
struct Doorbell {
  std::atomic<uint32_t> rings;
  std::atomic<uint32_t> asleep;

  void ring() {
    if (asleep.load(std::memory_order_relaxed) != 0) ring_now();
  }
  void ring_now() {
    asleep.store(0, std::memory_order_relaxed);
    rings.fetch_add(1, std::memory_order_release);
    futex_wake(&rings);
  }
  /// Sleeps for `limit` at most. `ready` is called once more after the sleeper has left its mark.
  template <typename Ready>
  void sleep(Ready ready, std::chrono::microseconds limit) {
    const uint32_t seen = rings.load(std::memory_order_acquire);
    asleep.store(1, std::memory_order_seq_cst);
    if (!ready()) futex_wait(&rings, seen, limit);
  }
};

}  // namespace pycomm
