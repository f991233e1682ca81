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
  /// A window has ended. `rate` bytes per second were acknowledged in it, at least that if it is
  /// not `known`; `sent` and `repeated` are the bytes that have left since the connections were
  /// made, and those of them that had left before. `queued`: they have waited on their way.
  void update(double rate, uint64_t sent, uint64_t repeated, bool known = true,
              bool queued = false) {
    if (sent < sent_ || repeated < repeated_) {  // a connection was made again
      sent_ = sent;
      repeated_ = repeated;
      return;
    }
    // A rate that still grows is that of a slow start.
    const bool grows = rate >= kGrowth * best();
    rates_[windows_++ % kRates] = rate;
    if (known && queued && !grows && limit_ == 0 && pause_ == 0 && sent >= kEnoughBytes) {
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
    } else if (known && (limit_ > 0 || (!grows && ++lossy_ == kFirst))) {
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

  /// There are bytes to send, and were none.
  void begin(Clock::time_point now) {
    was_idle_ = true;
    if (now - looked_ < kPause) return;
    begun_ = since_ = now;
    full_ = false;
    delivered_ = std::numeric_limits<uint64_t>::max();  // by now: not known
  }

  /// True if update() has something to do.
  bool is_due(Clock::time_point now) const { return now - looked_ >= kLook; }

  /// Takes a look at all sockets. A window in which they had bytes to send all the time, or in
  /// which acknowledgements came look by look, says how fast the path is, one in which they had
  /// some how fast at least; none does from before the first acknowledgements.
  void update(Clock::time_point now, const SocketUse& use) {
    follow_arrivals(now, use.delivered);
    queued_ |= use.round_trip_us > kQueued * use.least_round_trip_us + kJitterMicroseconds;
    if (now - since_ < kWindow) return;
    const double round_trip = use.least_round_trip_us * 1e-6;
    if (seconds(now - begun_) < kFirst * round_trip) return;
    const double took = seconds(now - since_);
    const bool is_full = use.unsent > 0, some = full_ || is_full;
    if (took < round_trip && some) return;  // goes on
    // A connection that was made again counts from 0.
    const bool counts = some && took < kStale && use.delivered >= delivered_;
    const bool whole = full_ && is_full && !was_idle_, arrives = arriving_ >= kSeen;
    const double rate = arrives  ? static_cast<double>(arrived_) / arriving_
                        : counts ? static_cast<double>(use.delivered - delivered_) / took
                                 : 0;
    if (rate > 0) limit_.update(rate, use.sent, use.repeated, whole || arrives, queued_);
    if (rate > 0 && whole && use.delivered >= kSlowStart) {
      if (rate_ > 0 && rate < kGrowth * rate_) {
        in_use_ = worth(std::max(rate, limit_.best()), round_trip);
      }
      rate_ = rate;
    }
    since_ = now;
    delivered_ = use.delivered;
    full_ = is_full;
    was_idle_ = queued_ = false;
    arriving_ = 0;
    arrived_ = 0;
  }

  /// Returns the number of sockets for a rate (bytes per second) and a round trip (seconds).
  static size_t worth(double rate, double round_trip) {
    return static_cast<size_t>(std::ceil(rate * round_trip / kPerSocket)) + (rate == 0);
  }

 private:
  static constexpr auto kWindow = std::chrono::milliseconds(100);
  static constexpr auto kLook = kWindow / 10, kPause = 2 * kWindow;  // from one look to the next
  static constexpr double kFirst = 1.1;  // round trips until what is sent is acknowledged
  static constexpr double kStale = 2, kGrowth = 1.25;
  static constexpr double kPerSocket = 64 << 10;  // bytes in flight
  // Seconds: from one look to the next at most, and looks in a row that show a rate.
  static constexpr double kNear = 0.03, kSeen = 0.03;
  static constexpr uint64_t kSlowStart = 1 << 20;  // bytes until a rate may be that of the path
  // A round trip that takes this much longer than the least one, and this much time, has a queue.
  static constexpr double kQueued = 1.25, kJitterMicroseconds = 5000;

  // Adds what was acknowledged from one look to the next, if it was also before: at the ends of a
  // pause, a part of the time between two looks brings nothing.
  void follow_arrivals(Clock::time_point now, uint64_t delivered) {
    const double took = seconds(now - std::exchange(looked_, now));
    const uint64_t before = std::exchange(seen_, delivered);
    const bool arrives = delivered > before && took <= kNear;
    if (arrives && arrives_) {
      arriving_ += took;
      arrived_ += delivered - before;
    }
    arrives_ = arrives;
  }

  static double seconds(Clock::duration time) {
    return std::chrono::duration<double>(time).count();
  }

  size_t in_use_ = std::numeric_limits<size_t>::max();
  Clock::time_point begun_, since_, looked_;
  uint64_t delivered_ = 0;
  bool full_ = false;      // when the window began
  bool was_idle_ = false;  // since then, like what follows
  bool queued_ = false;
  double arriving_ = 0;                                   // seconds in which acknowledgements came
  uint64_t arrived_ = 0;                                  // bytes of them
  uint64_t seen_ = std::numeric_limits<uint64_t>::max();  // delivered at the last look
  bool arrives_ = false;                                  // something had come then
  double rate_ = 0;                                       // of the last whole window
  RateLimit limit_;
};

}  // namespace pycomm::tcp
