#include "collectives/common/links.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "core/decimal.h"

namespace pycomm {
namespace {

// Rate of a far link that nobody has declared. It decides between fewer bytes and fewer round trips
// for some 100 KB to 10 MB, where a wrong guess costs little either way.
constexpr double kGuess = 100e6 / 8;

bool known(double rate) { return rate > 0; }

/// Returns the least rate that is known; 0 if none is.
double slowest_of(const std::vector<double>& rates) {
  double slowest = 0;
  for (const double rate : rates) {
    if (known(rate)) slowest = slowest == 0 ? rate : std::min(slowest, rate);
  }
  return slowest;
}

/// Returns the time, in buffers per rate, that two shots with the best shares take.
double two_shot_time(const std::vector<double>& rates, const std::vector<double>& shares) {
  double time = 0;
  for (size_t r = 0; r < rates.size(); r++) {
    const double sent = 1 + (static_cast<double>(rates.size()) - 2) * shares[r];
    if (known(rates[r])) time = std::max(time, sent / rates[r]);
  }
  return time;
}

std::string megabits(double rate) { return known(rate) ? decimal_text(rate * 8 / 1e6, 4) : "-"; }

}  // namespace

// Rank r is done at the time T if its share x is at most (T rate - 1) / (n - 2). The least T for
// which these bounds add up to 1 is found rank by rank: the fastest k ranks own something, and then
// T = (n - 2 + k) / (sum of their rates). No rank is done before it has sent its own buffer, which
// takes the slowest one 1 / rate: if that is more than T, time is left for the others, and all
// bounds at that time are reduced in proportion.
std::vector<double> best_shares(const std::vector<double>& rates) {
  const size_t n = rates.size();
  std::vector<double> shares(n, 1.0 / static_cast<double>(std::max<size_t>(n, 1)));
  const double slowest = slowest_of(rates);
  const bool equal =
      std::all_of(rates.begin(), rates.end(), [&](double rate) { return rate == rates.front(); });
  if (n < 3 || slowest == 0 || equal) return shares;

  std::vector<double> sorted;
  for (const double rate : rates) {
    if (known(rate)) sorted.push_back(rate);
  }
  std::sort(sorted.rbegin(), sorted.rend());
  double time = 1 / slowest;
  if (sorted.size() == n) {  // else a rank without limit may own what is left
    double sum = 0;
    for (size_t k = 1; k <= n; k++) {
      sum += sorted[k - 1];
      const double all = (static_cast<double>(n) - 2 + static_cast<double>(k)) / sum;
      const bool last = k == n || all * sorted[k] <= 1;
      if (last) time = std::max(time, all);
      if (last) break;
    }
  }
  double total = 0;
  for (size_t r = 0; r < n; r++) {
    const double bound = (time * rates[r] - 1) / (static_cast<double>(n) - 2);
    shares[r] = known(rates[r]) ? std::clamp(bound, 0.0, 1.0) : 1.0;
    total += shares[r];
  }
  for (double& share : shares) share /= total;
  return shares;
}

Links::Links(std::vector<LinkRate> rates) : rates_(std::move(rates)) {
  for (const LinkRate& rate : rates_) {
    const bool both = known(rate.send) && known(rate.receive);
    slower_.push_back(both ? std::min(rate.send, rate.receive) : std::max(rate.send, rate.receive));
  }
  if (std::none_of(slower_.begin(), slower_.end(), known)) slower_.clear();
  std::vector<int> everyone(slower_.size());
  std::iota(everyone.begin(), everyone.end(), 0);
  all_ = shares_of(slower_, everyone);
  const double slowest = slowest_of(slower_);
  if (slowest == 0) return;
  speed_.byte = 1 / slowest;
  speed_.shared = two_shot_time(slower_, best_shares(slower_)) * slowest;
}

void Links::set_round_trips(std::vector<uint32_t> round_trips) {
  round_trips_ = std::move(round_trips);
  farthest_ =
      round_trips_.empty() ? 0 : *std::max_element(round_trips_.begin(), round_trips_.end());
  if (!far()) return;
  speed_.way = farthest_ / 2e6;
  if (speed_.byte == 0) speed_.byte = 1 / kGuess;
}

// Between the two limits lies a gap, so that a measurement that is off by a little changes nothing:
// if any pair of ranks lies in it, there are no sites.
std::vector<int> Links::sites() const {
  constexpr uint32_t kNear = 2000, kFar = 8000;  // microseconds
  const auto n = static_cast<size_t>(std::lround(std::sqrt(round_trips_.size())));
  std::vector<int> first(n);
  for (size_t i = 0; i < n; i++) {
    first[i] = static_cast<int>(i);
    for (size_t j = i; j-- > 0;) {
      if (round_trips_[i * n + j] < kNear) first[i] = first[j];
    }
  }
  for (size_t i = 0; i < n; i++) {
    for (size_t j = 0; j < i; j++) {
      const uint32_t round_trip = round_trips_[i * n + j];
      if (first[i] == first[j] ? round_trip >= kNear : round_trip < kFar) return {};
    }
  }
  return first;
}

Shares Links::shares_of(const std::vector<double>& known_rates, const std::vector<int>& members) {
  if (known_rates.empty() || members.size() < 3) return {};
  std::vector<double> rates;
  for (const int member : members) rates.push_back(known_rates[static_cast<size_t>(member)]);
  const std::vector<double> shares = best_shares(rates);
  const bool equal = std::all_of(shares.begin(), shares.end(),
                                 [&](double share) { return share == shares.front(); });
  return equal ? Shares() : Shares(shares);
}

std::string Links::describe() const {
  std::string text;
  if (far()) text = "round trips up to " + decimal_text(farthest_ / 1e3, 3) + " ms";
  if (slower_.empty()) return text;
  text += text.empty() ? "rates" : ", rates";
  for (const LinkRate& rate : rates_) {
    const std::string sends = megabits(rate.send), receives = megabits(rate.receive);
    text += " " + sends + (sends == receives ? "" : "/" + receives);
  }
  text += " Mbit/s";
  if (all_.equal()) return text;
  text += ", shares";
  const std::vector<uint32_t>& begins = all_.begins();
  for (size_t r = 0; r + 1 < begins.size(); r++) {
    text += " " + decimal_text((begins[r + 1] - begins[r]) / 65536.0, 3);
  }
  return text;
}

}  // namespace pycomm
