// Pacer: user-space pacing of TCP, which makes a fast link slow (PYCOMM_LINK).
#pragma once
#include <algorithm>
#include <chrono>
#include <mutex>

#include "core/types.h"

namespace pycomm::tcp {

/// A token bucket over everything that a rank sends by TCP. Any thread.
///
/// A link that has been idle lets a small burst through. A link that a channel waits for keeps its
/// rate even if the waiting thread is late, as the kernel would go on sending from the socket's
/// buffer.
class Pacer {
 public:
  /// `rate` is in bytes per second; 0 for no limit.
  explicit Pacer(double rate)
      : rate_(rate),
        burst_(std::clamp(rate * kBurstSeconds, kSmallestBurst, kLargestBurst)),
        backlog_(std::max(burst_, std::min(rate * kBacklogSeconds, kLargestBacklog))),
        quantum_(static_cast<size_t>(burst_ / 4)) {}

  bool limits() const { return rate_ > 0; }

  /// Returns how much of `bytes` may be sent now; the caller returns what it did not send by
  /// give_back(). Never a tiny part of a large write, since each write costs a system call.
  size_t take(size_t bytes) {
    if (!limits()) return bytes;
    std::lock_guard<std::mutex> lock(mutex_);
    refill();
    const size_t part = std::min(bytes, quantum_);
    denied_ = tokens_ < static_cast<double>(part);
    if (denied_) return 0;
    tokens_ -= static_cast<double>(part);
    return part;
  }

  void give_back(size_t bytes) {
    if (!limits() || bytes == 0) return;
    std::lock_guard<std::mutex> lock(mutex_);
    tokens_ += static_cast<double>(bytes);
  }

  /// Returns the time until there is enough for several writes, so that waiting channels share.
  std::chrono::microseconds wait() {
    std::lock_guard<std::mutex> lock(mutex_);
    refill();
    const double missing = std::max(burst_ / 2 - tokens_, 0.0);
    return std::chrono::microseconds(static_cast<int64_t>(missing / rate_ * 1e6) + 1);
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr double kBurstSeconds = 2e-3;
  static constexpr double kSmallestBurst = 64 << 10;
  static constexpr double kLargestBurst = 256 << 10;
  static constexpr double kBacklogSeconds = 0.1;
  static constexpr double kLargestBacklog = 4 << 20;  // the kernel's usual limit of a send buffer

  void refill() {
    const auto now = Clock::now();
    const double grown = tokens_ + std::chrono::duration<double>(now - last_).count() * rate_;
    tokens_ = std::max(tokens_, std::min(grown, denied_ ? backlog_ : burst_));
    last_ = now;
  }

  const double rate_, burst_, backlog_;
  const size_t quantum_;
  std::mutex mutex_;
  double tokens_ = burst_;
  bool denied_ = false;  // a channel waits for tokens
  Clock::time_point last_ = Clock::now();
};

}  // namespace pycomm::tcp
