// topk of a whole tensor in CUDA: kernels that run one after the other, each over all values or
// over all that travel, and share scratch memory. Encoding reads the values three times: for the
// first digits, for the candidates, and to put the chosen values in order. A range whose candidates
// do not fit in its slot is read up to twice more. Compiled by nvcc and NVRTC.
#pragma once
#include "codecs/topk/pack_cuda.h"
#include "core/philox.h"

namespace pycomm::codecs::topk {

/// Share of a warp in a stage of the selection.
template <bool kFeedback>
struct Stage {
  Scratch scratch;
  WarpRange<kFeedback> range;
  uint32_t* bins;  ///< three histograms
  Digit* digit;
  size_t warp;

  __device__ Stage(const TopkParams& args, uint32_t stage) : scratch(args, false) {
    warp = warp_of_grid();
    bins = scratch.bins + stage * 3 * kBins;
    digit = scratch.state->digit[stage];
    // The sample is p already: only kernels without feedback work on it.
    const bool sampled = !kFeedback && stage == kSample;
    range.from.x = sampled ? scratch.sample : args.in;
    range.from.residual = args.residual;
    range.from.n = sampled ? args.sample_n : args.numel;
    range.begin = warp * kTile;
    range.end = range.begin + kTile < range.from.n ? range.begin + kTile : range.from.n;
    range.slot = scratch.slots + warp * kSlot;
    range.room = kSlot;
  }

  __device__ bool there() const { return range.begin < range.from.n; }
};

/// True for the exact selection where the sample's threshold was good.
__device__ __forceinline__ bool is_done(const TopkParams& args) {
  return reinterpret_cast<const State*>(args.scratch)->done != 0;
}

__global__ void __launch_bounds__(cuda::kThreads) clear_kernel(const TopkParams args) {
  for (uint32_t k = 0; k < cuda::kVector; k++) {
    const size_t i = (size_t{blockIdx.x} * cuda::kVector + k) * cuda::kThreads + threadIdx.x;
    if (i < kCleared) reinterpret_cast<uint32_t*>(args.scratch)[i] = 0;
  }
}

/// Draws the sample: a lane takes four stretches, which share a group of random words.
template <bool kFeedback>
__global__ void __launch_bounds__(cuda::kThreads) sample_kernel(const TopkParams args) {
  const size_t group = size_t{blockIdx.x} * cuda::kThreads + threadIdx.x;
  if (group * 4 >= args.sample_n) return;
  float* to = Scratch(args, false).sample;
  const Random4 random = random_words(args.seed, args.step, args.tensor, group);
#pragma unroll
  for (uint32_t k = 0; k < 4; k++) {
    const size_t stretch = group * 4 + k;
    if (stretch >= args.sample_n) continue;
    const size_t begin = stretch * args.sample;
    const size_t left = args.numel - begin;
    const size_t i = begin + sampled_place(left < args.sample ? left : args.sample, random.word[k]);
    to[stretch] = kFeedback ? args.in[i] + args.residual[i] : args.in[i];
  }
}

template <bool kFeedback>
__global__ void __launch_bounds__(cuda::kThreads) first_kernel(const TopkParams args) {
  __shared__ uint32_t bins[kBins];
  if (is_done(args)) return;
  const Stage<kFeedback> stage(args, args.stage);
  clear_bins(bins);
  stage.range.count_first(bins);
  add_bins(bins, stage.bins);
}

template <bool kFeedback>
__global__ void __launch_bounds__(cuda::kThreads) second_kernel(const TopkParams args) {
  __shared__ uint32_t bins[kBins];
  if (is_done(args)) return;
  const Stage<kFeedback> stage(args, args.stage);
  const uint64_t k = !kFeedback && args.stage == kSample ? args.sample_k : args.asked;
  const Digit first = find_digit(stage.bins, static_cast<uint32_t>(k));
  clear_bins(bins);
  const uint2 counted = stage.range.count_second(first.bin, bins);
  if (stage.there() && threadIdx.x % cuda::kLanes == 0) stage.scratch.counted[stage.warp] = counted;
  add_bins(bins, stage.bins + kBins);
  if (!leads_grid()) return;
  stage.digit[0] = first;
  if (args.stage == kExact) {
    const bool is_void = any_beyond(stage.bins, void_bits(static_cast<Values>(args.values)));
    stage.scratch.state->is_void = is_void ? 1 : 0;
  }
}

/// Two blocks on a multiprocessor are enough: for five, ptxas would spill a register.
template <bool kFeedback>
__global__ void __launch_bounds__(cuda::kThreads, 2) third_kernel(const TopkParams args) {
  __shared__ uint32_t bins[kBins];
  if (is_done(args)) return;
  const Stage<kFeedback> stage(args, args.stage);
  const Digit first = stage.digit[0];
  const Digit second = find_digit(stage.bins + kBins, first.place);
  const uint32_t prefix = first.bin << 11 | second.bin;
  const uint32_t candidates = stage.there() ? stage.scratch.counted[stage.warp].y : 0;
  clear_bins(bins);
  stage.range.count_third(prefix, candidates, bins);
  add_bins(bins, stage.bins + 2 * kBins);
  if (leads_grid()) stage.digit[1] = {prefix, second.place};
}

/// Returns the cut of a stage, from its three histograms. Called by all threads of the block.
__device__ __forceinline__ Threshold find_cut(const Digit& two, const uint32_t* bins) {
  const Digit third = find_digit(bins + 2 * kBins, two.place);
  return {two.bin << kSecondShift | third.bin, third.place};
}

/// Counts around the exact cut.
template <bool kFeedback>
__global__ void __launch_bounds__(cuda::kThreads) exact_kernel(const TopkParams args) {
  if (is_done(args)) return;
  const Stage<kFeedback> stage(args, kExact);
  const Threshold cut = find_cut(stage.digit[1], stage.bins);
  if (stage.there()) {
    const uint2 around = stage.range.count_around(cut.bits, stage.scratch.counted[stage.warp]);
    if (threadIdx.x % cuda::kLanes == 0) stage.scratch.around[stage.warp] = around;
  }
  if (leads_grid()) stage.scratch.state->cut = cut;
}

/// Counts around the threshold of the sample, and finds values that make the record void.
template <bool kFeedback>
__global__ void __launch_bounds__(cuda::kThreads) sampled_kernel(const TopkParams args) {
  const Stage<kFeedback> stage(args, kExact);
  State* state = stage.scratch.state;
  const uint32_t limit = void_bits(static_cast<Values>(args.values));
  const Threshold cut = find_cut(state->digit[kSample][1], stage.bins + 3 * kBins);
  uint32_t greater = 0, equal = 0;
  bool beyond = false;
  stage.range.from.walk(stage.range.begin, stage.range.end,
                        [&](size_t, const cuda::Vector<float>& p, int size) {
                          for (int k = 0; k < cuda::kVector; k++) {
                            const uint32_t bits = magnitude_bits(p.v[k]);
                            const bool there = k < size;
                            greater += there && bits > cut.bits;
                            equal += there && bits == cut.bits;
                            beyond |= there && bits >= limit;
                          }
                        });
  const uint2 around{sum_of_warp(greater), sum_of_warp(equal)};
  if (stage.there() && threadIdx.x % cuda::kLanes == 0) stage.scratch.around[stage.warp] = around;
  if (beyond) atomicOr(&state->is_void, 1u);
  if (leads_grid()) state->cut.bits = cut.bits;
}

/// Turns the counts of each warp into the counts before it and into the number of values that
/// travel. One block: it reads and writes 8 bytes for each kTile values, a small part of what any
/// of the kernels around it reads.
__global__ void __launch_bounds__(cuda::kThreads) scan_kernel(const TopkParams args) {
  if (is_done(args)) return;
  const Scratch scratch(args, false);
  const uint2 total = scan_in_place(scratch.around, (args.numel + kTile - 1) / kTile);
  if (threadIdx.x != 0) return;
  State* state = scratch.state;
  state->k = static_cast<uint32_t>(args.asked);
  if (args.stage == kExact) return;
  const uint64_t chosen = uint64_t{total.x} + total.y;
  if (state->is_void) {
    state->k = 1;
    state->done = 1;
  } else if (args.least <= chosen && chosen <= args.k) {
    state->k = static_cast<uint32_t>(chosen);
    state->cut.ties = total.y;
    state->done = 1;
  }
}

template <bool kFeedback>
__global__ void __launch_bounds__(cuda::kThreads) choose_kernel(const TopkParams args) {
  const Stage<kFeedback> stage(args, kExact);
  const State& state = *stage.scratch.state;
  if (!stage.there()) return;
  if (state.is_void) {
    if constexpr (kFeedback) {
      for (size_t i = stage.range.begin + threadIdx.x % cuda::kLanes; i < stage.range.end;
           i += cuda::kLanes) {
        args.new_residual[i] = args.residual[i];
      }
    }
    return;
  }
  choose(stage.range, state.cut, stage.scratch.around[stage.warp], stage.scratch.chosen,
         static_cast<uint32_t*>(nullptr), args.new_residual);
}

template <bool kFeedback>
__global__ void __launch_bounds__(cuda::kThreads) pack_kernel(const TopkParams args) {
  const Scratch scratch(args, false);
  const State& state = *scratch.state;
  const Record record = record_of(args, args.numel, state.k);
  uint8_t* to = args.payload + (args.sample ? kHeader : 0);
  const size_t group = warp_of_grid();
  if (group * kGroup < record.k) {
    write_group<kFeedback>(record, to, group, scratch.chosen, state.is_void != 0, args.residual,
                           args.new_residual);
  }
  if (!args.sample) return;
  auto* words = reinterpret_cast<uint32_t*>(args.payload);
  if (leads_grid()) {
    words[0] = static_cast<uint32_t>(kHeader + record.bytes);
    words[1] = state.k;
  }
  const size_t end = (kHeader + record_of(args, args.numel, args.k).bytes) / 4;
  const size_t threads = size_t{gridDim.x} * cuda::kThreads;
  for (size_t i = (kHeader + record.bytes) / 4 + blockIdx.x * cuda::kThreads + threadIdx.x; i < end;
       i += threads) {
    words[i] = 0;
  }
}

// ------------------------------------------------------------------- decoding

/// Returns the record of a payload; k is 0 if its header is damaged.
__device__ __forceinline__ Record read_record(const TopkParams& args, const uint8_t*& from) {
  from = args.payload;
  if (!args.sample) return record_of(args, args.numel, args.k);
  const auto* header = reinterpret_cast<const uint32_t*>(from);
  from += kHeader;
  const size_t k = header[1] <= args.k ? header[1] : 0;
  const Record record = record_of(args, args.numel, k);
  return header[0] == kHeader + record.bytes ? record : record_of(args, args.numel, 0);
}

/// Checks if the record is void.
__global__ void __launch_bounds__(cuda::kThreads) check_kernel(const TopkParams args) {
  const uint8_t* from;
  const Record record = read_record(args, from);
  const size_t j = size_t{blockIdx.x} * cuda::kThreads + threadIdx.x;
  bool fine = j >= record.k || index_in_order(record, from, j);
  if (leads_grid() && (record.k == 0 || begins_with_nan(from))) fine = false;
  if (!fine) atomicOr(&reinterpret_cast<State*>(args.scratch)->is_void, 1u);
}

/// Writes the value of places that do not travel.
template <bool kAdd>
__global__ void __launch_bounds__(cuda::kThreads) fill_kernel(const TopkParams args) {
  const bool is_void = reinterpret_cast<const State*>(args.scratch)->is_void != 0;
  if (kAdd && !is_void) return;
  const cuda::Tile<kRows> tile(args.numel, args.out);
  if (tile.empty()) return;
  const float other = is_void ? bits_float(kNanBits) : 0.0f;
  cuda::Vector<float> value[kRows];
#pragma unroll
  for (int row = 0; row < kRows; row++) value[row] = {{other, other, other, other}};
  tile.store(args.out, args.numel, value);
}

template <bool kAdd>
__global__ void __launch_bounds__(cuda::kThreads) scatter_kernel(const TopkParams args) {
  if (reinterpret_cast<const State*>(args.scratch)->is_void != 0) return;
  const uint8_t* from;
  const Record record = read_record(args, from);
  const size_t j = size_t{blockIdx.x} * cuda::kThreads + threadIdx.x;
  if (j >= record.k) return;
  float* to = args.out + read_index(record, from, j);
  *to = kAdd ? *to + read_value(record, from, j) : read_value(record, from, j);
}

}  // namespace pycomm::codecs::topk
