// Flow: how fast the sockets of a channel send together, how many of them that is worth, and what
// each may send at most. Seen from this rank alone: the peer reads from whichever socket brings a
// frame.
#pragma once
#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>

#include "transports/tcp/net/buffers.h"
#include "transports/tcp/rate_limit.h"

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

  /// Returns bytes per second for each of them; 0: no limit.
  double limit(size_t most) const {
    return limit_.bytes_per_second() / static_cast<double>(sockets(most));
  }

  /// Bytes are to be sent again after a pause.
  void begin(Clock::time_point now) {
    begun_ = since_ = now;
    full_ = false;
  }

  /// True if update() has something to do.
  bool is_due(Clock::time_point now) const { return now - since_ >= kWindow; }

  /// Takes a look at all sockets. Only a window in which they had bytes to send all the time says
  /// how fast the path is, and none from before the first acknowledgements.
  void update(Clock::time_point now, const SocketUse& use) {
    const double round_trip = use.least_round_trip_us * 1e-6;
    if (seconds(now - begun_) < kFirst * round_trip) return;
    const double took = seconds(now - since_);
    if (took < round_trip && full_ && use.unsent > 0) return;  // goes on
    // A connection that was made again counts from 0.
    const bool was_full = full_ && use.unsent > 0 && took < kStale && use.delivered >= delivered_;
    const double rate = was_full ? static_cast<double>(use.delivered - delivered_) / took : 0;
    if (rate > 0) {
      // A rate that still grows is that of a slow start.
      if (rate_ > 0 && rate < kGrowth * rate_) {
        in_use_ = worth(rate, round_trip);
        limit_.update(rate, use.sent, use.repeated);
      }
      rate_ = rate;
    }
    since_ = now;
    delivered_ = use.delivered;
    full_ = use.unsent > 0;
  }

  /// Returns the number of sockets for a rate (bytes per second) and a round trip (seconds).
  static size_t worth(double rate, double round_trip) {
    return static_cast<size_t>(std::ceil(rate * round_trip / kPerSocket)) + (rate == 0);
  }

 private:
  static constexpr auto kWindow = std::chrono::milliseconds(100);
  static constexpr double kFirst = 1.1;  // round trips until what is sent is acknowledged
  static constexpr double kStale = 2, kGrowth = 1.25;
  static constexpr double kPerSocket = 64 << 10;  // bytes in flight

  static double seconds(Clock::duration time) {
    return std::chrono::duration<double>(time).count();
  }

  size_t in_use_ = std::numeric_limits<size_t>::max();
  Clock::time_point begun_, since_;
  uint64_t delivered_ = 0;
  bool full_ = false;
  double rate_ = 0;  // of the last such window
  RateLimit limit_;
};

}  // namespace pycomm::tcp
