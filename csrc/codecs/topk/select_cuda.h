// Selection of the k largest magnitudes in CUDA, exactly, and in order. Compiled by nvcc and NVRTC.
//
// The bits of |p| are a radix key of 11, 11 and 9 bits. Each digit of the k-th largest comes from a
// histogram, whose counts do not depend on order. A warp owns a range of the values. It keeps those
// whose first digit is not below a bound in a slot, in the order of their indices: all digits are
// found among them. Only a warp whose slot is too small reads its range again, or all do if fewer
// than k values reach the bound.
#pragma once
#include "codecs/base/warp_cuda.h"
#include "codecs/topk/scratch.h"
#include "core/cuda_vector.h"

namespace pycomm::codecs::topk {

constexpr int kFirstShift = 20;
constexpr int kSecondShift = 9;

/// Values p = x + residual of a record.
template <bool kFeedback>
struct Input {
  const float* x;
  const float* residual;
  size_t n;

  __device__ float at(size_t i) const { return kFeedback ? x[i] + residual[i] : x[i]; }

  /// Loads kStep values from `at` on, a lane four neighbours of each row. Beyond the end zeros.
  __device__ __forceinline__ void load(size_t at, cuda::Vector<float> (&p)[kRows]) const {
    const size_t lane = threadIdx.x % cuda::kLanes * cuda::kVector;
    const bool aligned =
        (reinterpret_cast<size_t>(x) | (kFeedback ? reinterpret_cast<size_t>(residual) : 0)) % 16 ==
        0;
    if (aligned && at + kStep <= n) {
      cuda::Vector<float> kept[kRows];
#pragma unroll
      for (int row = 0; row < kRows; row++) {
        const size_t i = at + row * cuda::kRow + lane;
        p[row] = *reinterpret_cast<const cuda::Vector<float>*>(x + i);
        if (kFeedback) kept[row] = *reinterpret_cast<const cuda::Vector<float>*>(residual + i);
      }
#pragma unroll
      for (int row = 0; row < kRows; row++) {
        for (int k = 0; kFeedback && k < cuda::kVector; k++) {
          p[row].v[k] = p[row].v[k] + kept[row].v[k];
        }
      }
      return;
    }
#pragma unroll
    for (int row = 0; row < kRows; row++) {
      for (int k = 0; k < cuda::kVector; k++) {
        const size_t i = at + row * cuda::kRow + lane + k;
        p[row].v[k] = i < n ? this->at(i) : 0.0f;
      }
    }
  }

  /// Calls f(i, four values from i on, how many of them exist) for each lane, all lanes of the warp
  /// together, in the order of the indices. Values beyond the end are 0.
  template <typename F>
  __device__ __forceinline__ void walk(size_t begin, size_t end, F&& f) const {
    const size_t lane = threadIdx.x % cuda::kLanes * cuda::kVector;
    for (size_t at = begin; at < end; at += kStep) {
      cuda::Vector<float> p[kRows];
      load(at, p);
#pragma unroll
      for (int row = 0; row < kRows; row++) {
        const size_t i = at + row * cuda::kRow + lane;
        const size_t left = i < n ? n - i : 0;
        f(i, p[row], left >= cuda::kVector ? cuda::kVector : static_cast<int>(left));
      }
    }
  }
};

/// Stores the `size` values of a lane from value i on.
__device__ __forceinline__ void store_four(const cuda::Vector<float>& p, size_t i, int size,
                                           float* to) {
  if (size == cuda::kVector && reinterpret_cast<size_t>(to) % 16 == 0) {
    cuda::store_vector(to + i, p);
    return;
  }
  for (int k = 0; k < cuda::kVector; k++) {
    if (k < size) to[i + k] = p.v[k];
  }
}

/// Sets the histogram to zero; ends with a barrier of the block.
__device__ __forceinline__ void clear_bins(uint32_t* bins) {
  for (uint32_t bin = threadIdx.x; bin < kBins; bin += cuda::kThreads) bins[bin] = 0;
  __syncthreads();
}

/// Adds the histogram of a block to that of the grid, after a barrier of the block.
__device__ __forceinline__ void add_bins(const uint32_t* bins, uint32_t* total) {
  __syncthreads();
  for (uint32_t bin = threadIdx.x; bin < kBins; bin += cuda::kThreads) {
    if (bins[bin] > 0) atomicAdd(total + bin, bins[bin]);
  }
}

/// Returns the bin that holds the place-th of all counted values, from the top; {0, 0} if fewer are
/// counted. counts(bin) is how many a bin has. Called by all threads of the block.
template <typename F>
__device__ __forceinline__ Digit find_digit(const F& counts, uint32_t place) {
  __shared__ uint32_t warp_sums[cuda::kWarps];
  __shared__ Digit found;
  constexpr uint32_t kEach = kBins / cuda::kThreads;
  const uint32_t top = kBins - 1 - threadIdx.x * kEach;
  uint32_t mine = 0;
  for (uint32_t k = 0; k < kEach; k++) mine += counts(top - k);
  uint32_t before = sum_of_lanes_up_to(mine);
  if (lane_of_warp() == cuda::kLanes - 1) warp_sums[warp_of_block()] = before;
  if (threadIdx.x == 0) found = {0, 0};
  __syncthreads();
  before -= mine;
  for (uint32_t warp = 0; warp < warp_of_block(); warp++) before += warp_sums[warp];
  if (before < place && place - before <= mine) {
    uint32_t bin = top, left = place - before;
    for (; left > counts(bin); bin--) left -= counts(bin);
    found = {bin, left};
  }
  __syncthreads();
  const Digit digit = found;
  __syncthreads();  // before the next call overwrites it
  return digit;
}

/// True if the histogram of first digits has a magnitude that makes its record void: both limits,
/// 2^127 and Inf, begin a bin.
__device__ __forceinline__ bool any_beyond(const uint32_t* bins, uint32_t limit) {
  uint32_t beyond = 0;
  for (uint32_t bin = limit >> kFirstShift; bin < kBins; bin++) beyond += bins[bin];
  return beyond > 0;
}

/// Values of a record and their places, in order, and for how many there is room.
struct Chosen {
  float* p;
  uint32_t* index;
  uint32_t room;  ///< a caller that changes the values meanwhile could have more chosen
};

/// How many values of a mask the rows have, a byte for each row: those of the lanes before this
/// one, and of all lanes.
struct RowCounts {
  uint32_t before;
  uint32_t all;

  /// `mask` has four bits of each row. Called by all lanes of a warp.
  __device__ __forceinline__ explicit RowCounts(uint32_t mask) {
    uint32_t mine = 0;
#pragma unroll
    for (int row = 0; row < kRows; row++) {
      mine |= __popc(mask >> cuda::kVector * row & 15) << 8 * row;
    }
    before = sum_of_lanes_up_to(mine);  // at most 128 of a row
    all = __shfl_sync(kAll, before, cuda::kLanes - 1);
    before -= mine;
  }
  __device__ uint32_t sum() const { return __dp4a(all, 0x01010101u, 0u); }
};

constexpr uint32_t kBits = kRows * cuda::kVector;  ///< of a mask

/// Returns the mask of the values that are `least` or more, and of NaN. `least` is finite.
__device__ __forceinline__ uint32_t reaching(const cuda::Vector<float> (&p)[kRows], float least) {
  uint32_t below = 0;
#pragma unroll
  for (int bit = kBits - 1; bit >= 0; bit--) {
    const float p_of = p[bit / cuda::kVector].v[bit % cuda::kVector];
    // The sign of the difference tells.
    below = __funnelshift_l(float_bits(fabsf(p_of) - least), below, 1);
  }
  return ~below & ((1u << kBits) - 1);
}

/// Range [begin, end) of a warp in a record, and its slot.
template <bool kFeedback>
struct WarpRange {
  Input<kFeedback> from;
  size_t begin;
  size_t end;
  Chosen slot;

  /// Counts the first digits below `bound`.
  __device__ void count_first(uint32_t bound, uint32_t* bins) const {
    from.walk(begin, end, [&](size_t, const cuda::Vector<float>& p, int size) {
      for (int k = 0; k < cuda::kVector; k++) {
        const uint32_t digit = magnitude_bits(p.v[k]) >> kFirstShift;
        if (k < size && digit < bound) atomicAdd(bins + digit, 1u);
      }
    });
  }

  /// Counts the first digits from `bound` on, and puts their values into the slot while there is
  /// room. With feedback all values go to `rest`. Returns how many reach the bound.
  __device__ uint32_t keep(uint32_t bound, uint32_t* bins, float* rest) const {
    const float least = bits_float(bound << kFirstShift);
    uint32_t kept = 0;
    for (size_t at = begin; at < end; at += kStep) {
      cuda::Vector<float> p[kRows];
      from.load(at, p);
      uint32_t mask = reaching(p, least);
      const size_t first = at + lane_of_warp() * cuda::kVector;
      if (at + kStep > from.n) {
        for (uint32_t bit = 0; bit < kBits; bit++) {
          const size_t i = first + bit / cuda::kVector * cuda::kRow + bit % cuda::kVector;
          if (i >= from.n) mask &= ~(1u << bit);
        }
      }
#pragma unroll
      for (int row = 0; kFeedback && row < kRows; row++) {
        const size_t i = first + row * cuda::kRow, left = i < from.n ? from.n - i : 0;
        store_four(p[row], i, left < cuda::kVector ? static_cast<int>(left) : cuda::kVector, rest);
      }
      const RowCounts counts(mask);
      const float* const values = kFeedback ? rest : from.x;
#pragma unroll 1
      for (uint32_t left = mask; left != 0; left &= left - 1) {
        const uint32_t below = (left & -left) - 1, bit = __popc(below), row = bit / cuda::kVector;
        const size_t i = first + row * cuda::kRow + bit % cuda::kVector;
        const float value = values[i];
        atomicAdd(bins + (magnitude_bits(value) >> kFirstShift), 1u);
        const uint32_t rows_before = (1u << 8 * row) - 1;
        const uint32_t place = __dp4a(counts.all & rows_before, 0x01010101u, kept) +
                               (counts.before >> 8 * row & 0xff) +
                               __popc((mask & below) >> cuda::kVector * row);
        if (place < slot.room) {
          slot.p[place] = value;
          slot.index[place] = static_cast<uint32_t>(i);
        }
      }
      kept += counts.sum();
    }
    return kept;
  }

  /// True if the slot holds what keep() counted.
  __device__ bool holds(uint32_t kept) const { return kept <= slot.room; }

  /// Calls f(bits) for each value, or for those in the slot if it holds all that count. Each is
  /// taken by one lane.
  template <typename F>
  __device__ __forceinline__ void each(uint32_t kept, F&& f) const {
    if (holds(kept)) {
      for (uint32_t j = lane_of_warp(); j < kept; j += cuda::kLanes) f(magnitude_bits(slot.p[j]));
      return;
    }
    from.walk(begin, end, [&](size_t, const cuda::Vector<float>& p, int size) {
      for (int k = 0; k < cuda::kVector; k++) {
        if (k < size) f(magnitude_bits(p.v[k]));
      }
    });
  }

  /// Counts second digits of the values with this first one.
  __device__ void count_second(uint32_t first, uint32_t kept, uint32_t* bins) const {
    each(kept, [&](uint32_t bits) {
      if (bits >> kFirstShift == first) atomicAdd(bins + (bits >> kSecondShift) % kBins, 1u);
    });
  }

  /// Counts third digits; `prefix` is the first two digits.
  __device__ void count_third(uint32_t prefix, uint32_t kept, uint32_t* bins) const {
    each(kept, [&](uint32_t bits) {
      if (bits >> kSecondShift == prefix) atomicAdd(bins + bits % (1u << kSecondShift), 1u);
    });
  }

  /// Returns (values above `bits`, values equal to it).
  __device__ uint2 count_around(uint32_t bits, uint32_t kept) const {
    uint32_t greater = 0, equal = 0;
    each(kept, [&](uint32_t other) {
      greater += other > bits;
      equal += other == bits;
    });
    return {sum_of_warp(greater), sum_of_warp(equal)};
  }
};

/// Stores those of `count` values that are chosen in their places; see choose().
__device__ __forceinline__ void choose_of(const Chosen& from, uint32_t count, const Threshold& cut,
                                          uint2 before, const Chosen& to) {
  uint32_t equals = before.y, place = before.x + (equals < cut.ties ? equals : cut.ties);
  for (uint32_t begin = 0; begin < count; begin += cuda::kLanes) {
    const uint32_t j = begin + lane_of_warp();
    const float p = j < count ? from.p[j] : 0.0f;
    const uint32_t bits = magnitude_bits(p);
    const uint32_t equal = __ballot_sync(kAll, j < count && bits == cut.bits);
    const bool tied = bits == cut.bits && equals + __popc(equal & lanes_below()) < cut.ties;
    const bool mine = j < count && (bits > cut.bits || tied);
    const uint32_t all = __ballot_sync(kAll, mine), at = place + __popc(all & lanes_below());
    if (mine && at < to.room) {
      to.p[at] = p;
      to.index[at] = from.index[j];
    }
    equals += __popc(equal);
    place += __popc(all);
  }
}

/// Stores the chosen values of a range in their places. `before`: values above and equal to the cut
/// in earlier ranges.
__device__ inline void choose(const WarpRange<false>& range, const Threshold& cut, uint2 before,
                              const Chosen& to) {
  uint32_t equals = before.y;
  uint32_t count = before.x + (equals < cut.ties ? equals : cut.ties);
  range.from.walk(range.begin, range.end, [&](size_t i, const auto& p, int size) {
    uint32_t mine = 0, tied = 0;  // a bit for each of the four values
#pragma unroll
    for (int k = 0; k < cuda::kVector; k++) {
      const uint32_t bits = magnitude_bits(p.v[k]);
      mine |= (k < size && bits > cut.bits ? 1u : 0u) << k;
      tied |= (k < size && bits == cut.bits ? 1u : 0u) << k;
    }
    if (equals < cut.ties && __ballot_sync(kAll, tied != 0) != 0) {
      uint32_t place = equals;
#pragma unroll
      for (int k = 0; k < cuda::kVector; k++) {
        const uint32_t all = __ballot_sync(kAll, (tied >> k & 1) != 0);
        place += __popc(all & lanes_below());
        equals += __popc(all);
      }
#pragma unroll
      for (int k = 0; k < cuda::kVector; k++) {
        const uint32_t one = tied >> k & 1;
        mine |= (place < cut.ties ? one : 0u) << k;
        place += one;
      }
    }
    if (__ballot_sync(kAll, mine != 0) != 0) {
      uint32_t place = count;
#pragma unroll
      for (int k = 0; k < cuda::kVector; k++) {
        const uint32_t all = __ballot_sync(kAll, (mine >> k & 1) != 0);
        place += __popc(all & lanes_below());
        count += __popc(all);
      }
#pragma unroll
      for (int k = 0; k < cuda::kVector; k++) {
        if ((mine >> k & 1) == 0 || place >= to.room) continue;
        to.p[place] = p.v[k];
        to.index[place++] = static_cast<uint32_t>(i + k);
      }
    }
  });
}

}  // namespace pycomm::codecs::topk
