// Links: what the ranks of a group know of the network between them, equal on all ranks, and what
// follows from it: the shares of owners and the prices of algorithms. docs/networks.md derives
// both.
#pragma once
#include <string>
#include <vector>

#include "collectives/common/shares.h"
#include "core/env.h"

namespace pycomm {

/// Speed of the network as far as it is known; 0: not known, counted as fast.
struct Speed {
  double way = 0;   ///< seconds that a message travels to the farthest rank
  double byte = 0;  ///< seconds of a byte on the slowest rank's link
  double shared =
      0;  ///< bytes of the slowest rank in two shots with the best shares, of one buffer
};

/// Returns the shares with which two shots of ranks at these rates (bytes per second, the slower
/// direction of each; 0: no limit) take the least time, as parts of 1. Owner r sends and receives
/// 1 + (n - 2) share(r) buffers. Shares are equal if the rates are.
PYCOMM_API std::vector<double> best_shares(const std::vector<double>& rates);

class PYCOMM_API Links {
 public:
  /// Nothing is known.
  Links() = default;
  /// `rates[r]` is what rank r declares of its host's link.
  explicit Links(std::vector<LinkRate> rates);

  /// Sets the round trips in microseconds: those between rank i and rank j are at i * ranks + j.
  void set_round_trips(std::vector<uint32_t> round_trips);
  bool has_round_trips() const { return !round_trips_.empty(); }
  /// True if a round trip takes a millisecond or more.
  bool far() const { return farthest_ >= kFar; }

  /// Returns the lowest rank of the site of each rank; empty if there are no sites. A site are
  /// hosts within two milliseconds of each other, if all others are eight or more away.
  std::vector<int> sites() const;

  /// Returns the shares of some ranks, or of all of them, by the rates that they declare.
  Shares shares(const std::vector<int>& members) const { return shares_of(slower_, members); }
  const Shares& shares() const { return all_; }
  const Speed& speed() const { return speed_; }

  /// Returns words for people, such as "round trips up to 61 ms, rates 20/100/100 Mbit/s"; empty if
  /// nothing is known.
  std::string describe() const;

 private:
  static constexpr uint32_t kFar = 1000;  // microseconds

  static Shares shares_of(const std::vector<double>& rates, const std::vector<int>& members);

  std::vector<double> slower_;  // direction of each rank; empty: none is known
  std::vector<LinkRate> rates_;
  std::vector<uint32_t> round_trips_;
  uint32_t farthest_ = 0;
  Shares all_;
  Speed speed_;
};

}  // namespace pycomm
