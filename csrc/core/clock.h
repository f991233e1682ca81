// Clock: the cheapest one of this machine, for time stamps on every operation.
#pragma once
#include <chrono>
#include <cstdint>

namespace pycomm {

/// Returns a count that grows evenly: the processor's if it has one that all cores share, else
/// nanoseconds. Never 0.
inline uint64_t ticks() {
#if defined(__x86_64__)
  return __builtin_ia32_rdtsc();
#else
  return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
#endif
}

/// Scale that converts ticks to nanoseconds since the epoch. The rate is measured between its
/// construction and its use, so stamps taken in between are right to about a microsecond.
class TickScale {
 public:
  TickScale() : first_(now()) {}

  /// One reading of the clock, for many stamps at once: they keep their distances.
  class Reading {
   public:
    int64_t epoch_ns(uint64_t stamp) const {
      const auto back = static_cast<double>(static_cast<int64_t>(last_.ticks - stamp));
      return epoch_ns_ - static_cast<int64_t>(back * ns_per_tick_);
    }
    /// Converts a duration.
    int64_t ns(uint64_t ticks) const {
      return static_cast<int64_t>(static_cast<double>(ticks) * ns_per_tick_);
    }

   private:
    friend class TickScale;
    struct Moment {
      uint64_t ticks;
      int64_t ns;
    };
    Moment last_{};
    double ns_per_tick_ = 1;
    int64_t epoch_ns_ = 0;
  };

  Reading read() const {
    using std::chrono::duration_cast;
    using std::chrono::nanoseconds;
    Reading reading;
    reading.last_ = now();
    if (reading.last_.ticks > first_.ticks) {
      reading.ns_per_tick_ = static_cast<double>(reading.last_.ns - first_.ns) /
                             static_cast<double>(reading.last_.ticks - first_.ticks);
    }
    const auto epoch = std::chrono::system_clock::now().time_since_epoch();
    reading.epoch_ns_ = duration_cast<nanoseconds>(epoch).count();
    return reading;
  }

 private:
  static Reading::Moment now() {
    const auto time = std::chrono::steady_clock::now().time_since_epoch();
    return {ticks(), std::chrono::duration_cast<std::chrono::nanoseconds>(time).count()};
  }
  Reading::Moment first_;
};

}  // namespace pycomm
