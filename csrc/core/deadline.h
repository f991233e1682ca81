// A point in time after which a wait gives up. Every wait in pycomm has one.
#pragma once
#include <algorithm>
#include <chrono>

namespace pycomm {

using Milliseconds = std::chrono::milliseconds;

class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  static Deadline after(Milliseconds limit) { return Deadline(limit, Clock::now() + limit); }
  /// Counts from the first question. For calls that mostly end before anybody asks: the clock costs
  /// a sixth of a small one. Ask one copy.
  static Deadline on_demand(Milliseconds limit) { return Deadline(limit, Clock::time_point()); }

  bool expired() const { return Clock::now() >= end(); }
  /// What is left, never negative.
  Milliseconds left() const {
    const auto left = end() - Clock::now();
    return std::max(Milliseconds(0), std::chrono::duration_cast<Milliseconds>(left));
  }
  /// What was granted at the start; for error texts.
  Milliseconds limit() const { return limit_; }

 private:
  Deadline(Milliseconds limit, Clock::time_point end) : limit_(limit), end_(end) {}
  Clock::time_point end() const {
    if (end_ == Clock::time_point()) end_ = Clock::now() + limit_;
    return end_;
  }
  Milliseconds limit_;
  mutable Clock::time_point end_;
};

}  // namespace pycomm
