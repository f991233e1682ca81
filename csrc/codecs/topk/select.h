// Selection of the k largest magnitudes of p = x + residual on the CPU, exactly, in order.
//
// A lower bound of the k-th largest comes from a sample or from the chunk before. One pass keeps
// all values from there on, with their places; the k-th largest is then found among few, and only
// they are visited: memory, which takes the time of long records, is read once. Where the bracket
// was wrong, three histograms of 11, 11 and 9 bits find the k-th largest instead: slower, never
// different. Included by topk.cpp only.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#include "codecs/base/loops.h"

namespace pycomm::codecs::topk {

/// The chosen values are all magnitudes above `bits`, and the first `ties` of those that equal it.
struct Cut {
  uint32_t bits = 0;
  size_t ties = 0;
  bool is_void = false;  ///< a magnitude reaches the limit
};

struct Source {
  const float* x;
  const float* residual;  ///< null: p = x
  size_t n;

  float at(size_t i) const { return residual ? x[i] + residual[i] : x[i]; }
};

/// Magnitudes between which the k-th largest is likely to be, and about how many reach `low`.
struct Bracket {
  uint32_t low, high;
  size_t expected;
};

/// Longer records are sampled; they are longer than any chunk.
constexpr size_t kSampled = 64 * 1024;
constexpr size_t kMostSampled = 256 * 1024;

/// Values that are looked at at once. Few of those are of interest.
constexpr size_t kAtOnce = 32;

/// Values of one step: those from `begin` on, but none from `end` on.
struct Step {
  template <bool kFeedback>
  PYCOMM_INLINE void load(const Source& from, size_t begin, size_t end) {
    n = std::min(kAtOnce, end - begin);
    for (size_t i = n; i < kAtOnce; i++) p[i] = 0.0f;
    const float* __restrict x = from.x + begin;
    const float* __restrict residual = kFeedback ? from.residual + begin : nullptr;
    if (n == kAtOnce) {
      for (size_t i = 0; i < kAtOnce; i++) p[i] = kFeedback ? x[i] + residual[i] : x[i];
    } else {
      for (size_t i = 0; i < n; i++) p[i] = kFeedback ? x[i] + residual[i] : x[i];
    }
  }

  /// Calls f(i, magnitude bits) for the values from a magnitude on, in their order.
  template <typename F>
  PYCOMM_INLINE void for_each_from(uint32_t low, const F& f) const {
    uint32_t reached = 0;
    const int limit = static_cast<int>(low);
    for (size_t i = 0; i < kAtOnce; i++) {
      reached |= (static_cast<int>(magnitude_bits(p[i])) >= limit ? 1u : 0u) << i;
    }
    if (n < kAtOnce) reached &= (1u << n) - 1;
    for (; reached != 0; reached &= reached - 1) {
      const auto i = static_cast<size_t>(__builtin_ctz(reached));
      f(i, magnitude_bits(p[i]));
    }
  }

  size_t n;
  alignas(64) float p[kAtOnce];
};

/// Returns the cut by three histograms, of the bits from the top down.
inline Cut radix_cut(const Source& from, size_t k, uint32_t limit) {
  constexpr int kShift[] = {20, 9, 0};
  constexpr int kBits[] = {11, 11, 9};
  uint32_t prefix = 0;
  size_t rest = k;
  for (int level = 0; level < 3; level++) {
    const int shift = kShift[level];
    const uint32_t mask = (1u << kBits[level]) - 1;
    // Neighbours are counted in two tables: equal values would wait for each other's store.
    uint32_t table[2][1 << 11] = {};
    for (size_t i = 0; i < from.n; i++) {
      const uint32_t bits = magnitude_bits(from.at(i));
      const bool counts = level == 0 || bits >> (shift + kBits[level]) == prefix;
      table[i % 2][bits >> shift & mask] += counts;
    }
    if (level == 0) {
      // Both limits, 2^127 and Inf, begin a bin.
      uint32_t beyond = 0;
      for (size_t bin = limit >> shift; bin <= mask; bin++) beyond += table[0][bin] + table[1][bin];
      if (beyond > 0) return {0, 0, true};
    }
    uint32_t bin = mask;
    for (;; bin--) {
      const size_t here = size_t{table[0][bin]} + table[1][bin];
      // The last bin has as many as are left, unless the caller changes values meanwhile.
      if (rest <= here || bin == 0) break;
      rest -= here;
    }
    prefix = prefix << kBits[level] | bin;
  }
  return {prefix, rest};
}

/// Returns the place of the sampled value in its stretch of `length` values.
inline size_t sampled_place(size_t length, uint32_t random) {
  return static_cast<size_t>(uint64_t{random} * length >> 32);
}

/// Returns a bracket from a sample of runs of 16 neighbours, four standard deviations wide.
inline Bracket sampled_bracket(const Source& from, size_t k) {
  constexpr size_t kRun = 16;
  const size_t runs = std::min(kMostSampled, std::max<size_t>(4096, from.n / 256)) / kRun;
  const size_t stride = from.n / runs;
  // At equal distances the runs would hit the same columns of a matrix, and the bracket be wrong.
  constexpr size_t kWords = 512;
  alignas(64) uint32_t random[kWords];
  std::vector<uint32_t> sample;
  sample.reserve(runs * kRun);
  for (size_t run = 0; run < runs; run++) {
    if (run % kWords == 0) random_block(RandomKey{}, run, kWords, random);
    const size_t begin = run * stride + sampled_place(stride - kRun + 1, random[run % kWords]);
    for (size_t i = 0; i < kRun; i++) sample.push_back(magnitude_bits(from.at(begin + i)));
  }
  const double share = static_cast<double>(k) / static_cast<double>(from.n);
  const double place = share * static_cast<double>(sample.size());
  const double off = 4.0 * std::sqrt(place * (1.0 - share)) + 1.0;
  const size_t last = std::min(sample.size() - 1, static_cast<size_t>(place + off));
  const auto first = static_cast<size_t>(std::max(place - off, 0.0));
  const auto at = [&](size_t i) { return sample.begin() + static_cast<std::ptrdiff_t>(i); };
  std::nth_element(at(0), at(last), sample.end(), std::greater<uint32_t>());
  std::nth_element(at(0), at(first), at(last), std::greater<uint32_t>());
  // Very few are wanted: nothing in the sample is surely above them.
  const uint32_t high = place > off ? *at(first) : kInfBits;
  return {*at(last), high, (last + 1) * (from.n / sample.size())};
}

namespace {

/// Writes the values that a cut chooses, with their places, and returns their number; but stops
/// when there is no room for kAtOnce more. If kStore, p of all goes to `new_residual`, which must
/// not be the residual.
template <bool kFeedback, bool kStore>
PYCOMM_SIMD size_t collect(const Source& from, Cut cut, size_t room, float* new_residual,
                           uint32_t* __restrict index, float* __restrict p) {
  size_t count = 0;
  Step step;
  for (size_t begin = 0; begin < from.n && count + kAtOnce <= room; begin += kAtOnce) {
    step.load<kFeedback>(from, begin, from.n);
    if (kStore) std::memcpy(new_residual + begin, step.p, 4 * step.n);
    step.for_each_from(cut.bits, [&](size_t i, uint32_t bits) {
      if (bits == cut.bits && cut.ties == 0) return;
      cut.ties -= bits == cut.bits;
      index[count] = static_cast<uint32_t>(begin + i);
      p[count++] = step.p[i];
    });
  }
  return count;
}

}  // namespace

/// Selects the values of one record after the other.
class Selector {
 public:
  /// `limit`: a record with a magnitude from here on is void.
  explicit Selector(uint32_t limit) : limit_(limit) {}

  /// Selects the k largest of n, 1 <= k <= n, and with a residual writes p of all values to
  /// `new_residual`, which may be the residual. Returns false if the record is void; then
  /// `new_residual` may have p or not.
  bool select(const Source& from, size_t k, float* new_residual) {
    float* const apart = from.residual != new_residual ? new_residual : nullptr;
    if (!select_among_some(from, k, apart)) {
      cut_ = radix_cut(from, k, limit_);
      if (!cut_.is_void) collect(from, cut_, k, apart);
    }
    known_ = !cut_.is_void;
    if (cut_.is_void) return false;
    drop_others();
    for (size_t i = 0; new_residual && !apart && i < from.n; i++) {
      new_residual[i] = from.x[i] + new_residual[i];
    }
    return true;
  }

  // What is selected, in the order of the indices. If the caller changes values meanwhile, it can
  // be more or less than k.
  size_t count() const { return count_; }
  const uint32_t* index() const { return index_.get(); }
  const float* p() const { return p_.get(); }

 private:
  /// Finds the cut among the values from a bracket on, which remain; false if that was wrong.
  bool select_among_some(const Source& from, size_t k, float* new_residual) {
    if (from.n <= kSampled && !known_) return false;
    Bracket bracket{0, 0, from.n};
    if (from.n > kSampled) {
      bracket = sampled_bracket(from, k);
    } else {
      // The cut of this chunk is likely to be near that of the chunk before: on normal values this
      // margin is 3.5 standard deviations.
      const float near = bits_float(cut_.bits);
      const float margin = 1.0f + 0.75f / std::sqrt(static_cast<float>(k));
      bracket.low = float_bits(near / margin);
      bracket.high = float_bits(near * margin);
    }
    const size_t room = std::min(from.n, 2 * bracket.expected + 4096);
    if (!collect(from, {bracket.low, SIZE_MAX}, room, new_residual)) return false;
    size_t above = 0;  // the bracket
    uint32_t top = 0;
    inside_.clear();
    for (size_t i = 0; i < count_; i++) {
      const uint32_t bits = magnitude_bits(p_[i]);
      top = std::max(top, bits);
      bits > bracket.high ? void(above++) : inside_.push_back(bits);
    }
    if (k <= above || k > count_) return false;
    const size_t rest = k - above;
    const auto nth = inside_.begin() + static_cast<std::ptrdiff_t>(rest - 1);
    std::nth_element(inside_.begin(), nth, inside_.end(), std::greater<uint32_t>());
    const auto greater = std::count_if(inside_.begin(), nth, [&](uint32_t b) { return b > *nth; });
    cut_ = {*nth, rest - static_cast<size_t>(greater), top >= limit_};
    return true;
  }

  /// Keeps the values that a cut chooses, and writes p of all to `new_residual`, which must not be
  /// the residual, if it has memory. Returns false if they are more than there is room for.
  bool collect(const Source& from, const Cut& cut, size_t room, float* new_residual) {
    room += kAtOnce;
    if (room_ < room) {
      index_.reset(new uint32_t[room]);
      p_.reset(new float[room]);
      room_ = room;
    }
    const auto run = !from.residual ? topk::collect<false, false>
                     : new_residual ? topk::collect<true, true>
                                    : topk::collect<true, false>;
    count_ = run(from, cut, room, new_residual, index_.get(), p_.get());
    return count_ + kAtOnce <= room;
  }

  /// Drops what the cut does not choose.
  void drop_others() {
    Cut cut = cut_;
    size_t chosen = 0;
    for (size_t i = 0; i < count_; i++) {
      const uint32_t bits = magnitude_bits(p_[i]);
      const bool tie = bits == cut.bits && cut.ties > 0;
      cut.ties -= tie;
      index_[chosen] = index_[i];
      p_[chosen] = p_[i];
      chosen += bits > cut.bits || tie;
    }
    count_ = chosen;
  }

  const uint32_t limit_;
  Cut cut_;
  bool known_ = false;  ///< cut_ is that of the previous record
  size_t count_ = 0, room_ = 0;
  std::unique_ptr<uint32_t[]> index_;  // as p_, not cleared: it may be large
  std::unique_ptr<float[]> p_;
  std::vector<uint32_t> inside_;
};

}  // namespace pycomm::codecs::topk
