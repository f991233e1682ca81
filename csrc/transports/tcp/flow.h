// Flow: how fast the sockets of a channel send together, and how many of them that is worth. Seen
// from this rank alone: the peer reads from whichever socket brings a frame.
#pragma once
#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>

#include "transports/tcp/net/buffers.h"

namespace pycomm::tcp {

/// Several sockets help where much is in flight: each has a buffer of its own, and a lost packet
/// holds up one of them alone. Where little is, they only compete: their congestion windows are so
/// small that each loss costs a timeout, and the frames of a message arrive out of order, so that
/// the receiver waits for the slowest socket while a link stands idle.
class Flow {
 public:
  using Clock = std::chrono::steady_clock;

  /// Returns how many of `most` sockets take new frames.
  size_t sockets(size_t most) const { return std::min(most, in_use_); }

  /// True if update() has something to do.
  bool is_due(Clock::time_point now) const { return now - since_ >= kWindow; }

  /// Takes a look at all sockets. Only a window in which they had bytes to send all the time says
  /// how fast the path is.
  void update(Clock::time_point now, const SocketUse& use) {
    const double took = std::chrono::duration<double>(now - since_).count();
    const double round_trip = use.least_round_trip_us * 1e-6;
    if (took < kRoundTrips * round_trip && full_ && use.unsent > 0) return;  // goes on
    // A connection that was made again counts from 0.
    const bool was_full =
        full_ && use.unsent > 0 && took < kStale && use.acknowledged >= acknowledged_;
    const double rate = was_full ? static_cast<double>(use.acknowledged - acknowledged_) / took : 0;
    // A rate that still grows is that of a slow start.
    if (rate > 0 && rate_ > 0 && rate < kGrowth * rate_) in_use_ = worth(rate, round_trip);
    rate_ = rate;
    since_ = now;
    acknowledged_ = use.acknowledged;
    full_ = use.unsent > 0;
  }

  /// Returns the number of sockets for a rate (bytes per second) and a round trip (seconds).
  static size_t worth(double rate, double round_trip) {
    return static_cast<size_t>(std::ceil(rate * round_trip / kPerSocket)) + (rate == 0);
  }

 private:
  static constexpr auto kWindow = std::chrono::milliseconds(100);
  static constexpr double kRoundTrips = 2, kStale = 2, kGrowth = 1.25;
  static constexpr double kPerSocket = 64 << 10;  // bytes in flight

  size_t in_use_ = std::numeric_limits<size_t>::max();
  Clock::time_point since_;
  uint64_t acknowledged_ = 0;
  bool full_ = false;
  double rate_ = 0;  // of the window before; 0: it was not full
};

}  // namespace pycomm::tcp
