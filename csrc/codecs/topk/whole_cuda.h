// topk of a whole tensor in CUDA: kernels that run one after the other, each over all values or
// over all that travel, and share scratch memory. Encoding reads the values once, after a sample of
// them; with feedback twice, since a record that is void must be known before the new residual,
// which may lie where the old one does, is written. Values from a bound on go into slots, in order;
// all values go to the new residual, where later kernels find them. A range that does not fit in
// its slot is read up to four times more. Compiled by nvcc and NVRTC.
#pragma once
#include "codecs/topk/pack_cuda.h"

namespace pycomm::codecs::topk {

/// Share of a warp in the selection.
template <bool kFeedback>
struct Share {
  Scratch scratch;
  WarpRange<kFeedback> range;
  State& state;
  size_t warp;

  __device__ Share(const TopkParams& args, const Input<kFeedback>& from)
      : scratch(args), state(*scratch.state), warp(warp_of(args)) {
    range.from = from;
    range.begin = warp * kTile;
    range.end = range.begin + kTile < from.n ? range.begin + kTile : from.n;
    auto* slot = scratch.slots + warp * 2 * kSlot;
    range.slot = {reinterpret_cast<float*>(slot), slot + kSlot, kSlot};
  }

  __device__ bool there() const { return range.begin < range.from.n; }
  __device__ uint32_t* bins(Histogram which) const { return scratch.bins + which * kBins; }
  /// Returns how many values of the range are kept, if those with this first digit are.
  __device__ uint32_t kept(uint32_t first) const {
    return !there() ? 0 : first < state.bound ? ~0u : scratch.kept[warp];
  }
};

/// After keep_kernel: with feedback the values are where the new residual will be.
__device__ __forceinline__ Share<false> later_share(const TopkParams& args) {
  const float* p = args.new_residual != nullptr ? args.new_residual : args.in;
  return {args, Input<false>{p, nullptr, args.numel}};
}

__global__ void __launch_bounds__(cuda::kThreads) clear_kernel(const Batch<TopkParams> batch) {
  const TopkParams args = tensor_of_block(batch);
  for (uint32_t k = 0; k < cuda::kVector; k++) {
    const size_t i = (size_t{block_of(args)} * cuda::kVector + k) * cuda::kThreads + threadIdx.x;
    if (i < kCleared) reinterpret_cast<uint32_t*>(args.scratch)[i] = 0;
  }
}

/// Counts the first digits of all values, x and residual.
__global__ void __launch_bounds__(cuda::kThreads) first_kernel(const Batch<TopkParams> batch) {
  const TopkParams args = tensor_of_block(batch);
  __shared__ uint32_t bins[kBins];
  const Share<true> share(args, {args.in, args.residual, args.numel});
  clear_bins(bins);
  share.range.count_first(kBins, bins);
  add_bins(bins, share.bins(kDeciding));
}

/// Counts the first digits of a sample: of each kSampleOf rows one, which changes from one to the
/// next so that it is not the same part of each line of a matrix.
__global__ void __launch_bounds__(cuda::kThreads) sample_kernel(const Batch<TopkParams> batch) {
  const TopkParams args = tensor_of_block(batch);
  __shared__ uint32_t bins[kBins];
  clear_bins(bins);
#pragma unroll
  for (uint32_t row = 0; row < kRows; row++) {
    const size_t group = warp_of(args) * kRows + row;
    const uint32_t mixed = static_cast<uint32_t>(group) * 0x9e3779b1u >> 16;
    const size_t first = (group * kSampleOf + mixed % kSampleOf) * cuda::kRow + lane_of_warp();
    for (size_t i = first; i < first + cuda::kRow; i += cuda::kLanes) {
      if (i < args.numel) atomicAdd(bins + (magnitude_bits(args.in[i]) >> kFirstShift), 1u);
    }
  }
  add_bins(bins, Scratch(args).bins + kDeciding * kBins);
}

/// Returns a place in the sample. Its value is seldom above the k-th of all: it lies an eighth and
/// four standard deviations behind the place that is expected for that.
__device__ __forceinline__ uint32_t place_in_sample(uint32_t k) {
  return k / kSampleOf + k / (8 * kSampleOf) + static_cast<uint32_t>(sqrtf(k) * 0.5f) + 4;
}

template <bool kFeedback>
__global__ void __launch_bounds__(cuda::kThreads) keep_kernel(const Batch<TopkParams> batch) {
  const TopkParams args = tensor_of_block(batch);
  __shared__ uint32_t bins[kBins];
  const Share<kFeedback> share(args, {args.in, args.residual, args.numel});
  const auto k = static_cast<uint32_t>(args.k);
  const uint32_t* const deciding = share.bins(kDeciding);
  const Digit found =
      find_digit([&](uint32_t bin) { return deciding[bin]; }, kFeedback ? k : place_in_sample(k));
  // Below Inf, since Inf - Inf has no sign to rely on; with feedback the record is void then.
  constexpr uint32_t kInf = kInfBits >> kFirstShift;
  const uint32_t bound = kFeedback || found.bin < kInf ? found.bin : kInf - 1;
  if (leads(args)) share.state.bound = bound;
  if (kFeedback && any_beyond(deciding, void_bits(static_cast<Values>(args.values)))) {
    if (leads(args)) share.state.is_void = 1;
    for (size_t i = share.range.begin + lane_of_warp(); i < share.range.end; i += cuda::kLanes) {
      args.new_residual[i] = args.residual[i];
    }
    return;
  }
  clear_bins(bins);
  const uint32_t kept = share.range.keep(bound, bins, args.new_residual);
  if (share.there() && lane_of_warp() == 0) share.scratch.kept[share.warp] = kept;
  add_bins(bins, share.bins(kKept));
}

/// Counts the first digits below the bound if fewer than k values reach it.
__global__ void __launch_bounds__(cuda::kThreads) refill_kernel(const Batch<TopkParams> batch) {
  const TopkParams args = tensor_of_block(batch);
  __shared__ uint32_t bins[kBins];
  const Share<false> share = later_share(args);
  const uint32_t* const kept = share.bins(kKept);
  const Digit first =
      find_digit([&](uint32_t bin) { return kept[bin]; }, static_cast<uint32_t>(args.k));
  if (first.place > 0 || share.state.is_void) return;
  clear_bins(bins);
  share.range.count_first(share.state.bound, bins);
  add_bins(bins, share.bins(kBelow));
}

/// Finds the first digit, and counts second digits.
__global__ void __launch_bounds__(cuda::kThreads) second_kernel(const Batch<TopkParams> batch) {
  const TopkParams args = tensor_of_block(batch);
  __shared__ uint32_t bins[kBins];
  const Share<false> share = later_share(args);
  const uint32_t *const kept = share.bins(kKept), *const below = share.bins(kBelow);
  // With feedback keep_kernel knows it.
  if (share.state.is_void) return;
  if (any_beyond(kept, void_bits(static_cast<Values>(args.values)))) {
    if (leads(args)) share.state.is_void = 1;
    return;
  }
  const Digit first = find_digit([&](uint32_t bin) { return kept[bin] + below[bin]; },
                                 static_cast<uint32_t>(args.k));
  clear_bins(bins);
  share.range.count_second(first.bin, share.kept(first.bin), bins);
  add_bins(bins, share.bins(kSecond));
  if (leads(args)) share.state.digit[0] = first;
}

__global__ void __launch_bounds__(cuda::kThreads) third_kernel(const Batch<TopkParams> batch) {
  const TopkParams args = tensor_of_block(batch);
  __shared__ uint32_t bins[kBins];
  const Share<false> share = later_share(args);
  if (share.state.is_void) return;
  const Digit first = share.state.digit[0];
  const uint32_t* const counted = share.bins(kSecond);
  const Digit second = find_digit([&](uint32_t bin) { return counted[bin]; }, first.place);
  const uint32_t prefix = first.bin << 11 | second.bin;
  clear_bins(bins);
  share.range.count_third(prefix, share.kept(first.bin), bins);
  add_bins(bins, share.bins(kThird));
  if (leads(args)) share.state.digit[1] = {prefix, second.place};
}

/// Finds the cut and counts around it.
__global__ void __launch_bounds__(cuda::kThreads) count_kernel(const Batch<TopkParams> batch) {
  const TopkParams args = tensor_of_block(batch);
  const Share<false> share = later_share(args);
  if (share.state.is_void) return;
  const Digit two = share.state.digit[1];
  const uint32_t* const counted = share.bins(kThird);
  const Digit third = find_digit([&](uint32_t bin) { return counted[bin]; }, two.place);
  const Threshold cut{two.bin << kSecondShift | third.bin, third.place};
  if (share.there()) {
    const uint32_t kept = share.kept(share.state.digit[0].bin);
    const uint2 around = share.range.count_around(cut.bits, kept);
    if (lane_of_warp() == 0) share.scratch.around[share.warp] = around;
  }
  if (leads(args)) share.state.cut = cut;
}

/// Turns the counts of each warp into the counts before it. One block: it reads and writes 8 bytes
/// for each kTile values, a small part of what any of the kernels around it reads.
__global__ void __launch_bounds__(cuda::kThreads) scan_kernel(const Batch<TopkParams> batch) {
  const TopkParams args = tensor_of_block(batch);
  const Scratch scratch(args);
  if (scratch.state->is_void == 0) scan_in_place(scratch.around, (args.numel + kTile - 1) / kTile);
}

__global__ void __launch_bounds__(cuda::kThreads) choose_kernel(const Batch<TopkParams> batch) {
  const TopkParams args = tensor_of_block(batch);
  const Share<false> share = later_share(args);
  const State& state = share.state;
  if (state.is_void || !share.there()) return;
  const uint32_t kept = share.kept(state.digit[0].bin);
  const uint2 before = share.scratch.around[share.warp];
  if (share.range.holds(kept)) {
    choose_of(share.range.slot, kept, state.cut, before, share.scratch.chosen);
  } else {
    choose(share.range, state.cut, before, share.scratch.chosen);
  }
}

template <bool kFeedback>
__global__ void __launch_bounds__(cuda::kThreads) pack_kernel(const Batch<TopkParams> batch) {
  const TopkParams args = tensor_of_block(batch);
  const Scratch scratch(args);
  const Record record = record_of(args, args.numel, args.k);
  const size_t group = warp_of(args);
  if (group * kGroup >= record.k) return;
  const auto chosen = [&](size_t j) { return Place{scratch.chosen.p[j], scratch.chosen.index[j]}; };
  write_group<kFeedback>(record, args.payload, group, chosen, scratch.state->is_void != 0,
                         args.residual, args.new_residual);
}

// ------------------------------------------------------------------- decoding

/// Checks if the record is void.
__global__ void __launch_bounds__(cuda::kThreads) check_kernel(const Batch<TopkParams> batch) {
  const TopkParams args = tensor_of_block(batch);
  const Record record = record_of(args, args.numel, args.k);
  const size_t j = size_t{block_of(args)} * cuda::kThreads + threadIdx.x;
  bool fine = j >= record.k || index_in_order(record, args.payload, j);
  if (leads(args) && begins_with_nan(args.payload)) fine = false;
  if (!fine) atomicOr(&reinterpret_cast<State*>(args.scratch)->is_void, 1u);
}

/// Writes the value of places that do not travel.
template <bool kAdd>
__global__ void __launch_bounds__(cuda::kThreads) fill_kernel(const Batch<TopkParams> batch) {
  const TopkParams args = tensor_of_block(batch);
  const bool is_void = reinterpret_cast<const State*>(args.scratch)->is_void != 0;
  if (kAdd && !is_void) return;
  const cuda::Tile<kRows> tile(block_of(args), args.numel, args.out);
  if (tile.empty()) return;
  const float other = is_void ? bits_float(kNanBits) : 0.0f;
  cuda::Vector<float> value[kRows];
#pragma unroll
  for (int row = 0; row < kRows; row++) value[row] = {{other, other, other, other}};
  tile.store(args.out, args.numel, value);
}

template <bool kAdd>
__global__ void __launch_bounds__(cuda::kThreads) scatter_kernel(const Batch<TopkParams> batch) {
  const TopkParams args = tensor_of_block(batch);
  if (reinterpret_cast<const State*>(args.scratch)->is_void != 0) return;
  const Record record = record_of(args, args.numel, args.k);
  const size_t j = size_t{block_of(args)} * cuda::kThreads + threadIdx.x;
  if (j >= record.k) return;
  const float value = read_value(record, args.payload, j);
  float* to = args.out + read_index(record, args.payload, j);
  *to = kAdd ? *to + value : value;
}

}  // namespace pycomm::codecs::topk
