// RateMeter: the most bytes per second that this rank has sent, measured from its traffic.
#pragma once
#include <algorithm>
#include <chrono>

#include "core/op_timing.h"

namespace pycomm {

/// Looks at the connections in windows of a collective's time. Only a window at both ends of which
/// bytes waited to be sent says something: otherwise the rank had little to send. And what it says
/// is a lower limit, since the bytes may have waited for one slow receiver, or the connections were
/// still looking for the rate of their path; so the most of several windows counts.
/// A window lasts many round trips as they are while the queues of the paths are full, since the
/// acknowledgements of a whole queue may arrive at once: in a shorter window, a link of 20 Mbit/s
/// was taken for one of 42. The rate includes frames and TLS, and no headers of TCP.
class RateMeter {
 public:
  using Clock = std::chrono::steady_clock;

  /// A collective begins. What happens between two of them is not measured.
  void begin() {
    since_ = {};
    begun_ = Clock::now();
  }

  /// To be called often. `look()` returns the sums over all connections.
  template <typename Look>
  void look(const Look& look) {
    const auto now = Clock::now();
    if (since_ == Clock::time_point()) {
      if (now - begun_ >= kStart) open(now, look());
      return;
    }
    if (now - since_ < window_) return;
    const LinkUse use = look();
    const Clock::duration window = std::max(window_, window_for(use));
    if (now - since_ < window) {  // the queues have grown
      window_ = window;
      return;
    }
    // From before the first look to after the last one: wherever this thread had to wait for a
    // processor, the rate is not taken for higher than it was.
    const double took = std::chrono::duration<double>(Clock::now() - since_).count();
    const bool full = before_.unsent > 0 && use.unsent > 0 && use.bytes >= before_.bytes;
    // A process that was stopped looks late, and has sent all meanwhile.
    if (full && now - since_ < kLate * window) {
      most_ = std::max(most_, static_cast<double>(use.bytes - before_.bytes) / took);
      windows_++;
    }
    open(now, use);
  }

  /// Returns the most bytes per second since the last report or the one before, so that a link that
  /// has become slower is known some time later; 0 if too little was measured. With the first
  /// windows of two calls alone, a link of 60 Mbit/s was taken for one of 20, and its equals
  /// for 40.
  double report() {
    if (windows_ < kEnough) return 0;
    const double most = std::max(most_, reported_);
    if (most_ > 0) reported_ = most_;
    most_ = 0;
    return most;
  }

 private:
  static constexpr auto kStart = std::chrono::milliseconds(10),
                        kWindow = std::chrono::milliseconds(250);
  static constexpr int kRoundTrips = 8, kLate = 2, kEnough = 4;

  static Clock::duration window_for(const LinkUse& use) {
    const std::chrono::microseconds round_trip(use.round_trip_us);
    return std::max<Clock::duration>(kWindow, kRoundTrips * round_trip);
  }

  void open(Clock::time_point now, const LinkUse& use) {
    since_ = now;
    before_ = use;
    window_ = window_for(use);
  }

  Clock::time_point begun_, since_;
  Clock::duration window_{};
  LinkUse before_;
  double most_ = 0, reported_ = 0;
  int windows_ = 0;  // that said something
};

}  // namespace pycomm
