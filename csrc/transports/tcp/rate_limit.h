// RateLimit: what the sockets of a channel may send together, once the path has shown its rate by
// dropping what was more.
#pragma once
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

namespace pycomm::tcp {

/// Each bbr socket remembers the best share of the path that it has had in ten round trips, so
/// several of them send more together than the path carries. Its queue overflows all the time, and
/// what is lost at the end of an operation costs a round trip or more. The sockets cannot know of
/// each other; the channel does. It limits them to what the peer has acknowledged while the queue
/// overflowed, and raises that limit as long as nothing is lost, slowly at first and then faster,
/// so that a path that has become faster is found within ten windows.
///
/// A path that loses packets by itself loses them at any rate. A few tries show that, and then
/// there is no limit for a long time.
class RateLimit {
 public:
  /// A window has ended in which all sockets always had bytes to send. `rate` bytes per second were
  /// acknowledged in it; `sent` and `repeated` are the bytes that have left since the connections
  /// were made, and those of them that had left before.
  void update(double rate, uint64_t sent, uint64_t repeated) {
    if (sent < sent_ || repeated < repeated_) {  // a connection was made again
      sent_ = sent;
      repeated_ = repeated;
      return;
    }
    if (sent - sent_ < kEnoughBytes) return;
    const bool loses =
        static_cast<double>(repeated - repeated_) >= kTooMuch * static_cast<double>(sent - sent_);
    sent_ = sent;
    repeated_ = repeated;
    rates_[windows_++ % kRates] = rate;
    if (pause_ > 0) {
      pause_--;
    } else if (!loses) {
      in_a_row_ = 0;
      lowered_ = false;
      if (++calm_ >= kCalm) tries_ = 0;
      if (limit_ > 0 && rate >= kInUse * limit_) raise();
    } else if (limit_ > 0 || ++in_a_row_ == kFirst) {
      lower(rate);
    }
  }

  /// Returns bytes per second, for all sockets together; 0: no limit.
  double bytes_per_second() const { return limit_; }

 private:
  static constexpr uint64_t kEnoughBytes = 1 << 20;
  // Less is taken for random loss, which bbr does not mind.
  static constexpr double kTooMuch = 0.025;
  static constexpr double kBelow = 0.97;  // so that the queue empties
  static constexpr double kInUse = 0.7;
  static constexpr double kFirstStep = 0.01, kLargestStep = 0.25;
  static constexpr int kFirst = 2;      // windows in a row: one may be that of a slow start
  static constexpr int kTries = 3;      // limits after which losses do not depend on the rate
  static constexpr int kCalm = 2;       // windows without losses after which a limit has helped
  static constexpr int kWithout = 100;  // windows without a limit then
  static constexpr size_t kRates = 8;   // windows of which the best counts

  void raise() {
    limit_ *= 1 + step_;
    step_ = std::min(2 * step_, kLargestStep);
  }

  void lower(double rate) {
    in_a_row_ = calm_ = 0;
    if (tries_ == kTries) {
      limit_ = 0;
      tries_ = 0;
      lowered_ = false;
      pause_ = kWithout;
      return;
    }
    // A single window may have been slow for another reason. If the best was too much, the path has
    // become slower.
    limit_ = kBelow * (lowered_ ? rate : *std::max_element(rates_.begin(), rates_.end()));
    lowered_ = true;
    tries_++;
    step_ = kFirstStep;
    pause_ = 1;  // in it, what was lost before is repeated
  }

  double limit_ = 0, step_ = kFirstStep;
  uint64_t sent_ = 0, repeated_ = 0;
  std::array<double, kRates> rates_ = {};
  size_t windows_ = 0;
  int in_a_row_ = 0;      // windows with losses, without a limit
  int tries_ = 0;         // limits since one has helped
  int calm_ = 0;          // windows without losses since then
  bool lowered_ = false;  // since the last window without losses
  int pause_ = 0;         // windows that change nothing
};

}  // namespace pycomm::tcp
