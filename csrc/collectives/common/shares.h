// Shares: how much of a buffer each rank owns. Equal, unless the ranks' links differ (links.h).
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace pycomm {

/// Shares of a number of owners, in steps of 1/65536. They are equal on all ranks.
class Shares {
 public:
  /// Equal shares of any number of owners.
  Shares() = default;
  /// Shares in these proportions, none negative, with a positive sum.
  explicit Shares(const std::vector<double>& parts) : begins_(parts.size() + 1, kWhole) {
    double sum = 0, before = 0;
    for (const double part : parts) sum += part;
    for (size_t i = 0; i < parts.size(); before += parts[i++]) {
      begins_[i] = static_cast<uint32_t>(std::lround(before / sum * kWhole));
    }
  }

  bool equal() const { return begins_.empty(); }
  /// Returns where the share of an owner begins in `units`; owner `count` begins at their end.
  /// Only for shares that are not equal.
  size_t begin(size_t units, int owner) const {
    const size_t before = begins_[static_cast<size_t>(owner)];
    return units / kWhole * before + units % kWhole * before / kWhole;
  }
  /// Returns the begin of each share in 65536 units, and their end; empty if they are equal.
  const std::vector<uint32_t>& begins() const { return begins_; }

 private:
  static constexpr uint32_t kWhole = 1 << 16;
  std::vector<uint32_t> begins_;
};

}  // namespace pycomm
