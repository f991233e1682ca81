// The backoff of polling waits. A part of _c10d.
#pragma once
#include <chrono>
#include <thread>

#include "core/interrupt.h"

namespace pycomm::torch_binding {

/// Frequent polls at first, since most waits are short, and then other threads may run. Throws
/// Interrupted.
class Backoff {
 public:
  void wait() {
    interrupts_.check();
    if (++looks_ <= kEager) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }

 private:
  static constexpr int kEager = 200;
  InterruptPoll interrupts_;
  int looks_ = 0;
};

}  // namespace pycomm::torch_binding
