// Deadline: a point in time after which a wait gives up. Every wait in pycomm has one.
#pragma once
#include <algorithm>
#include <chrono>
#include <cstdint>

namespace pycomm {

using Milliseconds = std::chrono::milliseconds;

/// A hundred years. Longer limits are reduced to it, since clocks in nanoseconds count 292 years.
constexpr Milliseconds kForever{int64_t{36525} * 24 * 3600 * 1000};
inline Milliseconds at_most_forever(Milliseconds limit) { return std::min(limit, kForever); }

class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  static Deadline after(Milliseconds limit) { return Deadline(limit); }
  /// Returns a deadline that counts from its first query. It is for calls that mostly end before
  /// any query: the clock costs a sixth of a small call. Where several copies are queried, they are
  /// copies of begun(), else each would count from its own first query.
  static Deadline on_demand(Milliseconds limit) { return Deadline(limit, Clock::time_point()); }

  /// Returns itself, and counts from now on, unless it does already.
  const Deadline& begun() const {
    static_cast<void>(end());
    return *this;
  }

  bool expired() const { return Clock::now() >= end(); }
  /// Returns the remaining time, never negative.
  Milliseconds left() const {
    const auto left = end() - Clock::now();
    return std::max(Milliseconds(0), std::chrono::duration_cast<Milliseconds>(left));
  }
  /// Returns the whole limit, for error texts.
  Milliseconds limit() const { return limit_; }

 private:
  explicit Deadline(Milliseconds limit) : Deadline(limit, Clock::now() + at_most_forever(limit)) {}
  Deadline(Milliseconds limit, Clock::time_point end) : limit_(at_most_forever(limit)), end_(end) {}
  Clock::time_point end() const {
    if (end_ == Clock::time_point()) end_ = Clock::now() + limit_;
    return end_;
  }
  Milliseconds limit_;
  mutable Clock::time_point end_;
};

}  // namespace pycomm
