// Flow: how fast the sockets of a channel send together, how many of them that is worth, and what
// each may send at most. Seen from this rank alone: the peer reads from whichever socket brings a
// frame.
#pragma once
#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <utility>

#include "transports/tcp/net/tuning.h"

namespace pycomm::tcp {

/// What the sockets of a channel may send together, once the path has shown its rate by holding up
/// or dropping what was more.
///
/// Each bbr socket remembers the best share of the path that it has had in ten round trips, so
/// several of them send more together than the path carries. Its queue overflows all the time, and
/// what is lost at the end of an operation costs a round trip or more. The sockets cannot know of
/// each other; the channel does. It limits them to what the peer has acknowledged when the queue
/// was first seen, or overflowed, and raises that limit as long as nothing is lost: faster and
/// faster, so that a path that has become faster is found within ten windows, but slowly while
/// there is a queue, which may also be that of others.
///
/// A path that loses packets by itself loses them at any rate. A few tries show that, and then
/// there is no limit for a long time.
class RateLimit {
 public:
  /// A window has ended. `rate` bytes per second were acknowledged in it; `sent` and `repeated` are
  /// the bytes that have left since the connections were made, and those of them that had left
  /// before. `queued`: they have waited on their way.
  void update(double rate, uint64_t sent, uint64_t repeated, bool queued) {
    if (sent < sent_ || repeated < repeated_) {  // a connection was made again
      sent_ = sent;
      repeated_ = repeated;
      return;
    }
    // A rate that still grows is that of a slow start.
    const bool grows = rate >= kGrowth * best();
    rates_[windows_++ % kRates] = rate;
    if (queued && !grows && limit_ == 0 && pause_ == 0 && sent >= kEnoughBytes) {
      limit_ = *std::max_element(rates_.begin(), rates_.end());
      step_ = kEarlyStep;
      pause_ = kOnTheWay;
    }
    if (sent - sent_ < kEnoughBytes) return;
    const bool loses =
        static_cast<double>(repeated - repeated_) >= kTooMuch * static_cast<double>(sent - sent_);
    sent_ = sent;
    repeated_ = repeated;
    if (pause_ > 0) {
      pause_--;
    } else if (!loses) {
      lowered_ = false;
      if (++calm_ >= kCalm) tries_ = 0;
      if (calm_ >= kLately) lossy_ = 0;
      if (limit_ > 0 && rate >= kInUse * limit_) raise(queued);
    } else if (limit_ > 0 || (!grows && ++lossy_ == kFirst)) {
      lower(rate);
    } else {
      calm_ = 0;
    }
  }

  /// Returns bytes per second, for all sockets together; 0: no limit.
  double bytes_per_second() const { return limit_; }
  /// Returns the rate of the last windows. The best of them may be too high: acknowledgements that
  /// were held up come together.
  double best() const {
    auto rates = rates_;
    std::nth_element(rates.begin(), rates.begin() + 1, rates.end(), std::greater<>());
    return rates[1];
  }

 private:
  static constexpr uint64_t kEnoughBytes = 1 << 20;
  // Less is taken for random loss, which bbr does not mind.
  static constexpr double kTooMuch = 0.025;
  static constexpr double kBelow = 0.97;  // so that the queue empties
  static constexpr double kInUse = 0.85, kGrowth = 1.25;
  static constexpr double kFirstStep = 0.01, kEarlyStep = 0.08, kLargestStep = 0.25;
  static constexpr int kFirst = 2;      // windows: one may be that of a slow start
  static constexpr int kLately = 5;     // windows without losses after which others are long ago
  static constexpr int kTries = 3;      // limits after which losses do not depend on the rate
  static constexpr int kCalm = 2;       // windows without losses after which a limit has helped
  static constexpr int kWithout = 100;  // windows without a limit then
  static constexpr int kOnTheWay = 2;   // windows in which what had been sent before may be lost
  static constexpr size_t kRates = 8;   // windows that count

  void raise(bool slowly) {
    limit_ *= 1 + (slowly ? kFirstStep : step_);
    if (!slowly) step_ = std::min(2 * step_, kLargestStep);
  }

  void lower(double rate) {
    lossy_ = calm_ = 0;
    if (tries_ == kTries) {
      limit_ = 0;
      tries_ = 0;
      lowered_ = false;
      pause_ = kWithout;
      return;
    }
    // A single window may have been slow for another reason. If the best was too much, the path has
    // become slower.
    limit_ = kBelow * (lowered_ ? rate : best());
    lowered_ = true;
    tries_++;
    step_ = kFirstStep;
    pause_ = 1;  // in it, what was lost before is repeated
  }

  double limit_ = 0, step_ = kFirstStep;
  uint64_t sent_ = 0, repeated_ = 0;
  std::array<double, kRates> rates_ = {};
  size_t windows_ = 0;
  int lossy_ = 0;         // windows with losses lately, without a limit
  int tries_ = 0;         // limits since one has helped
  int calm_ = 0;          // windows without losses since then
  bool lowered_ = false;  // since the last window without losses
  int pause_ = 0;         // windows that change nothing
};

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

  /// True if update() has something to do.
  bool is_due(Clock::time_point now) const { return now - looked_ >= kLook; }

  /// Takes a look at all sockets. A window in which acknowledgements came look by look says how
  /// fast the path is; how many sockets that is worth, only if there were bytes to send all the
  /// time.
  void update(Clock::time_point now, const SocketUse& use) {
    looked_ = now;
    follow_arrivals(now, use.delivered);
    queued_ |= use.round_trip_us > kQueued * use.least_round_trip_us + kJitterMicroseconds;
    pauses_ |= use.unsent == 0;
    const double round_trip = use.least_round_trip_us * 1e-6, took = seconds(now - since_);
    if (took < std::max(kWindow, round_trip)) return;
    const double rate = arriving_ >= kSeen ? arrived_ / arriving_ : 0;
    if (rate > 0) limit_.update(rate, use.sent, use.repeated, queued_);
    if (rate > 0 && !pauses_ && use.delivered >= kSlowStart) {
      if (rate_ > 0 && rate < kGrowth * rate_) {
        const double in_flight = std::max(rate, limit_.best()) * round_trip;
        in_use_ = static_cast<size_t>(std::ceil(in_flight / kPerSocket));
      }
      rate_ = rate;
    }
    since_ = now;
    queued_ = pauses_ = false;
    arriving_ = arrived_ = 0;
  }

 private:
  static constexpr auto kLook = std::chrono::milliseconds(10);  // from one to the next at least
  static constexpr double kPerSocket = 64 << 10;                // bytes in flight
  // Seconds: of a window; between acknowledgements that belong together, and all of those that show
  // a rate.
  static constexpr double kWindow = 0.1, kNear = 0.03, kSeen = 0.03;
  static constexpr double kGrowth = 1.25;
  static constexpr uint64_t kSlowStart = 1 << 20;  // bytes until a rate may be that of the path
  // A round trip that takes this much longer than the least one, and this much time, has a queue.
  static constexpr double kQueued = 1.25, kJitterMicroseconds = 5000;

  void follow_arrivals(Clock::time_point now, uint64_t delivered) {
    const uint64_t before = std::exchange(delivered_, delivered);
    if (delivered <= before) return;  // or a connection was made again, which counts from 0
    const double since = seconds(now - std::exchange(arrival_, now));
    if (since > kNear) return;  // in a part of this time there was a pause
    arriving_ += since;
    arrived_ += static_cast<double>(delivered - before);
  }

  static double seconds(Clock::duration time) {
    return std::chrono::duration<double>(time).count();
  }

  size_t in_use_ = std::numeric_limits<size_t>::max();
  Clock::time_point looked_, since_, arrival_;
  uint64_t delivered_ = 0;
  // Of the window:
  bool queued_ = false, pauses_ = false;  // at some look there was nothing to send
  double arriving_ = 0, arrived_ = 0;     // seconds in which acknowledgements came, and their bytes
  double rate_ = 0;                       // of the last whole window
  RateLimit limit_;
};

}  // namespace pycomm::tcp
