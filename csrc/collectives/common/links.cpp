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

// Measured rates are rounded to so many steps for each doubling, and taken for equal if the fastest
// is less than so many times the slowest.
constexpr double kSteps = 4, kAlike = 1.5;

bool known(double rate) { return rate > 0; }

std::vector<int> everyone(size_t ranks) {
  std::vector<int> result(ranks);
  std::iota(result.begin(), result.end(), 0);
  return result;
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

std::string parts_of(const Shares& shares) {
  if (shares.equal()) return " equal";
  std::string text;
  const std::vector<uint32_t>& begins = shares.begins();
  for (size_t r = 0; r + 1 < begins.size(); r++) {
    text += " " + decimal_text((begins[r + 1] - begins[r]) / 65536.0, 3);
  }
  return text;
}

}  // namespace

// Rank r is done at the time T if its share x is at most (T rate - 1) / (n - 2). The least T for
// which these bounds add up to 1 is found rank by rank: the fastest k ranks own something, and then
// T = (n - 2 + k) / (sum of their rates). No rank is done before it has sent its own buffer, which
// takes the slowest one 1 / rate: if that is more than T, time is left for the others, and all
// bounds at that time are reduced in proportion.
std::vector<double> best_shares(const std::vector<double>& rates) {
  const size_t n = rates.size();
  std::vector<double> shares(n, 1.0 / static_cast<double>(std::max<size_t>(n, 1)));
  double slowest = 0;
  for (const double rate : rates) {
    if (known(rate)) slowest = slowest == 0 ? rate : std::min(slowest, rate);
  }
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
  all_ = shares_of(slower_, everyone(slower_.size()));
  use(slower_);
}

void Links::use(std::vector<double> rates) {
  exact_ = std::move(rates);
  exact_all_ = shares_of(exact_, everyone(exact_.size()));
  double slowest = 0;
  for (const double rate : exact_) {
    if (known(rate)) slowest = slowest == 0 ? rate : std::min(slowest, rate);
  }
  speed_.byte = slowest > 0 ? 1 / slowest : far() ? 1 / kGuess : 0;
  speed_.shared = slowest > 0 ? two_shot_time(exact_, best_shares(exact_)) * slowest : 0;
}

// Measurements differ a little where links do not. They are rounded, and if they are less apart
// than half of the slowest one, they are taken for equal.
void Links::set_measured(const std::vector<double>& sends) {
  measured_ = sends;
  std::vector<double> rates = slower_.empty() ? std::vector<double>(sends.size()) : slower_;
  double least = 0, most = 0;
  for (size_t r = 0; r < sends.size(); r++) {
    if (!known(rates[r]) && known(sends[r])) {
      rates[r] = std::exp2(std::round(kSteps * std::log2(sends[r])) / kSteps);
    }
    if (!known(rates[r])) return use(slower_);
    least = r == 0 ? rates[r] : std::min(least, rates[r]);
    most = std::max(most, rates[r]);
  }
  if (slower_.empty() && most < kAlike * least) rates.assign(rates.size(), least);
  use(std::move(rates));
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
  const auto add = [&text](const std::string& words) {
    text += (text.empty() ? "" : ", ") + words;
  };
  if (!slower_.empty()) {
    std::string list;
    for (const LinkRate& rate : rates_) {
      const std::string sends = megabits(rate.send), receives = megabits(rate.receive);
      list += " " + sends + (sends == receives ? "" : "/" + receives);
    }
    add("rates" + list + " Mbit/s");
    if (!all_.equal()) add("shares" + parts_of(all_));
  }
  if (std::any_of(measured_.begin(), measured_.end(), known)) {
    std::string list;
    for (const double rate : measured_) list += " " + megabits(rate);
    add("measured" + list + " Mbit/s");
    if (exact_all_.begins() != all_.begins()) add("exact shares" + parts_of(exact_all_));
  }
  return text;
}

}  // namespace pycomm
