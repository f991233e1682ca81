// Pace of waits on shared memory: a wait polls, then yields, then sleeps.
//
// A poll costs nothing and sees a peer on another core within 0.1 us; a yield lets a peer run that
// shares our core; a sleep costs its waker some 60 us, so it begins when the wait is long anyway.
#pragma once
#include <sched.h>

#include <algorithm>

#include "transports/shm/region.h"

namespace pycomm {

constexpr auto kYieldFor = std::chrono::microseconds(500);
constexpr std::chrono::microseconds kSleepAtMost{2000};
constexpr std::chrono::microseconds kLongestSleep{20000};

/// The number of polls before a wait yields. Polling pays while our core is ours and the peer runs
/// on another one. That can change at any time (data loaders, other jobs), and yields reveal it:
/// one that returns late has let another thread run, and a wait that ends with the first yields
/// most likely waited for our own core.
class SpinPace {
 public:
  SpinPace() = default;
  explicit SpinPace(const SharedRegion& region)
      : most_(region.ranks() > region.cpus() ? kFew : kMost), now_(most_) {}

  int now() const { return now_; }
  /// Records that a wait has polled in vain and has ended after so many yields, the longest of
  /// which took `late`.
  void yielded(int yields, std::chrono::nanoseconds late) {
    if (most_ == kFew || yields == 0) return;
    if (late > kLate || (yields <= kSoon && now_ > kCheap)) {
      now_ = std::max(kFew, now_ / 2);
    } else if (yields > kSoon) {
      now_ = std::min(most_, now_ * 2);
    }
  }

 private:
  static constexpr int kMost = 2000;
  /// Ranks that share cores must not poll for long: the awaited peer may be waiting for the core.
  static constexpr int kFew = 4;
  /// This many polls cost less than a yield or two.
  static constexpr int kCheap = 32;
  static constexpr int kSoon = 2;
  /// A yield takes about half a microsecond if no other thread wants the core.
  static constexpr std::chrono::microseconds kLate{5};

  int most_ = kFew;
  int now_ = kFew;
};

/// Waits until `ready()`. `check()` throws to end the wait; `sleep(limit)` returns early when
/// the state may have changed.
template <typename Ready, typename Check, typename Sleep>
void wait_until(SpinPace& pace, Ready ready, Check check, Sleep sleep) {
  for (int i = pace.now(); i > 0; i--) {
    if (ready()) return;
    cpu_relax();
  }
  using Clock = Deadline::Clock;
  const auto begin = Clock::now();
  auto now = begin;
  int yields = 0;
  Clock::duration late{};
  for (; now < begin + kYieldFor; yields++) {
    if (ready()) return pace.yielded(yields, late);
    check();
    const auto before = Clock::now();
    ::sched_yield();
    now = Clock::now();
    late = std::max(late, now - before);
  }
  pace.yielded(yields, late);
  while (!ready()) {
    check();
    // In a long wait a little more delay matters little, and the core is left to others.
    const auto waited = std::chrono::duration_cast<std::chrono::microseconds>(now - begin);
    sleep(std::clamp<std::chrono::microseconds>(waited / 16, kSleepAtMost, kLongestSleep));
    now = Clock::now();
  }
}

}  // namespace pycomm
