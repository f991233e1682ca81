// Selection of the k largest magnitudes of p = x + residual on the CPU, exactly.
//
// A bracket around the k-th largest comes from a sample or from the chunk before. One pass counts
// the values above it and keeps those inside; the k-th largest is then found among few. Where the
// bracket was wrong, three histograms of 11, 11 and 9 bits find it instead: slower, never
// different. Included by topk.cpp only.
#pragma once
#include <algorithm>
#include <cmath>
#include <memory>

#include "codecs/base/loops.h"

namespace pycomm::codecs::topk {

/// The chosen values are all magnitudes above `bits`, and the first `ties` of those that equal it.
struct Cut {
  uint32_t bits = 0;
  size_t ties = 0;
  bool is_void = false;  ///< a magnitude reaches the limit of `find`
};

struct Source {
  const float* x;
  const float* residual;  ///< null: p = x
  size_t n;

  float at(size_t i) const { return residual ? x[i] + residual[i] : x[i]; }
};

/// Magnitudes around the wanted one: all that lie between `low` and `high`.
struct Bracket {
  uint32_t low = 0;
  uint32_t high = 0;
  size_t expected = 0;  ///< about so many values reach `low`; known of a sampled bracket only
};

/// Counts of one pass. `inside` has the magnitudes strictly between low and high.
struct Counts {
  size_t above = 0;    ///< > high
  size_t at_high = 0;  ///< == high
  size_t inside = 0;
  size_t at_low = 0;  ///< == low, if low < high
  uint32_t top = 0;   ///< the largest magnitude, if one reaches `low`
  bool overflow = false;
};

/// Largest temporary: a sample of the tensor, then the values inside the bracket.
constexpr size_t kRoom = 256 * 1024;
/// Longer records are sampled; they are longer than any chunk.
constexpr size_t kSampled = 64 * 1024;

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

namespace {

template <bool kFeedback>
PYCOMM_SIMD Counts count(const Source& from, Bracket b, uint32_t* inside, size_t room) {
  Counts counts;
  Step step;
  for (size_t begin = 0; begin < from.n; begin += kAtOnce) {
    if (counts.inside + kAtOnce > room) {
      counts.overflow = true;
      break;
    }
    step.load<kFeedback>(from, begin, from.n);
    step.for_each_from(b.low, [&](size_t, uint32_t bits) {
      counts.top = bits > counts.top ? bits : counts.top;
      if (bits > b.high) {
        counts.above++;
      } else if (bits == b.high) {
        counts.at_high++;
      } else if (bits == b.low) {
        counts.at_low++;
      } else {
        inside[counts.inside++] = bits;
      }
    });
  }
  return counts;
}

}  // namespace

/// Returns the cut of the k largest, if the bracket holds the k-th; else false.
inline bool cut_in(const Counts& counts, Bracket b, size_t k, uint32_t* inside, Cut& cut) {
  if (counts.overflow || k <= counts.above) return false;
  size_t rest = k - counts.above;
  if (rest <= counts.at_high) {
    cut = {b.high, rest};
    return true;
  }
  rest -= counts.at_high;
  if (rest <= counts.inside) {
    uint32_t* nth = inside + (rest - 1);
    std::nth_element(inside, nth, inside + counts.inside, std::greater<uint32_t>());
    const uint32_t bits = *nth;
    const auto above = std::count_if(inside, nth, [bits](uint32_t other) { return other > bits; });
    cut = {bits, rest - static_cast<size_t>(above)};
    return true;
  }
  rest -= counts.inside;
  if (rest > counts.at_low) return false;
  cut = {b.low, rest};
  return true;
}

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

/// Returns a bracket from a sample of runs of 16 neighbours, four standard deviations wide; `room`
/// values of scratch.
inline Bracket sampled_bracket(const Source& from, size_t k, uint32_t* sample, size_t room) {
  constexpr size_t kRun = 16;
  const size_t runs = std::min(room, std::max<size_t>(4096, from.n / 256)) / kRun;
  const size_t stride = from.n / runs;
  // At equal distances the runs would hit the same columns of a matrix, and the bracket be wrong.
  constexpr size_t kWords = 512;
  alignas(64) uint32_t random[kWords];
  size_t size = 0;
  for (size_t run = 0; run < runs; run++) {
    if (run % kWords == 0) random_block(RandomKey{}, run, kWords, random);
    const size_t begin = run * stride + sampled_place(stride - kRun + 1, random[run % kWords]);
    for (size_t i = 0; i < kRun; i++) sample[size++] = magnitude_bits(from.at(begin + i));
  }
  const double share = static_cast<double>(k) / static_cast<double>(from.n);
  const double place = share * static_cast<double>(size);
  const double off = 4.0 * std::sqrt(place * (1.0 - share)) + 1.0;
  const auto first = static_cast<size_t>(std::max(place - off, 0.0));
  const size_t last = std::min(size - 1, static_cast<size_t>(place + off));
  const auto order = std::greater<uint32_t>();
  std::nth_element(sample, sample + last, sample + size, order);
  std::nth_element(sample, sample + first, sample + last, order);
  // Very few are wanted: nothing in the sample is surely above them.
  return {sample[last], place > off ? sample[first] : kInfBits, (last + 1) * (from.n / size)};
}

inline Counts count_around(const Source& from, Bracket b, uint32_t* inside, size_t room) {
  return from.residual ? count<true>(from, b, inside, room) : count<false>(from, b, inside, room);
}

/// Finder of the cuts of one record after the other.
class Finder {
 public:
  /// `limit`: a record with a magnitude from here on is void.
  Finder(size_t largest_record, uint32_t limit)
      : limit_(limit),
        room_(std::min(largest_record + kAtOnce, kRoom)),
        scratch_(new uint32_t[room_]) {}

  /// Returns the cut of the k largest of n, 1 <= k <= n.
  Cut find(const Source& from, size_t k) {
    known_ = cut_by_bracket(from, k) || cut_by_radix(from, k);
    return cut_;
  }

 private:
  bool cut_by_bracket(const Source& from, size_t k) {
    Bracket b;
    if (from.n > kSampled) {
      b = sampled_bracket(from, k, scratch_.get(), room_);
    } else if (known_) {
      // The cut of this chunk is likely to be near that of the chunk before: on normal values this
      // margin is 3.5 standard deviations.
      const float near = bits_float(cut_.bits);
      const float margin = 1.0f + 0.75f / std::sqrt(static_cast<float>(k));
      b = {float_bits(near / margin), float_bits(near * margin)};
    } else {
      return false;
    }
    const Counts counts = count_around(from, b, scratch_.get(), room_);
    if (!cut_in(counts, b, k, scratch_.get(), cut_)) return false;
    cut_.is_void = counts.top >= limit_;
    return true;
  }

  bool cut_by_radix(const Source& from, size_t k) {
    cut_ = radix_cut(from, k, limit_);
    return !cut_.is_void;
  }

  uint32_t limit_;
  size_t room_;
  std::unique_ptr<uint32_t[]> scratch_;
  Cut cut_;
  bool known_ = false;  ///< cut_ is that of the previous record
};

}  // namespace pycomm::codecs::topk
