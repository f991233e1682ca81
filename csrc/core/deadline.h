// A point in time after which a wait gives up. Every wait in pycomm has one.
#pragma once
#include <algorithm>
#include <chrono>

namespace pycomm {

using Milliseconds = std::chrono::milliseconds;

class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  static Deadline after(Milliseconds limit) { return Deadline(limit); }

  bool expired() const { return Clock::now() >= end_; }
  /// What is left, never negative.
  Milliseconds left() const {
    return std::max(Milliseconds(0), std::chrono::duration_cast<Milliseconds>(end_ - Clock::now()));
  }
  /// What was granted at the start; for error texts.
  Milliseconds limit() const { return limit_; }

 private:
  explicit Deadline(Milliseconds limit) : limit_(limit), end_(Clock::now() + limit) {}
  Milliseconds limit_;
  Clock::time_point end_;
};

}  // namespace pycomm
