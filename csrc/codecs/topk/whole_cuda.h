// topk of a whole tensor in CUDA: kernels that run one after the other, each over all values or
// over all that travel, and share scratch memory. Encoding reads the values twice: for the first
// digits, and for the candidates and those above, which go into slots, in order; all values go to
// the new residual, where later kernels find them. A range that does not fit in its slot is read up
// to three times more. Compiled by nvcc and NVRTC.
#pragma once
#include "codecs/topk/pack_cuda.h"

namespace pycomm::codecs::topk {

/// Share of a warp in the selection.
template <bool kFeedback>
struct Share {
  Scratch scratch;
  WarpRange<kFeedback> range;
  uint32_t* bins;  ///< three histograms
  Digit* digit;
  size_t warp;

  __device__ Share(const TopkParams& args, const Input<kFeedback>& from) : scratch(args) {
    warp = warp_of(args);
    bins = scratch.bins;
    digit = scratch.state->digit;
    range.from = from;
    range.begin = warp * kTile;
    range.end = range.begin + kTile < from.n ? range.begin + kTile : from.n;
    auto* slot = scratch.slots + warp * 2 * kSlot;
    range.slot = {reinterpret_cast<float*>(slot), slot + kSlot, kSlot};
  }

  __device__ bool there() const { return range.begin < range.from.n; }
};

/// After second_kernel: with feedback the values are where the new residual will be.
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

template <bool kFeedback>
__global__ void __launch_bounds__(cuda::kThreads) first_kernel(const Batch<TopkParams> batch) {
  const TopkParams args = tensor_of_block(batch);
  __shared__ uint32_t bins[kBins];
  const Share<kFeedback> share(args, {args.in, args.residual, args.numel});
  clear_bins(bins);
  share.range.count_first(bins);
  add_bins(bins, share.bins);
}

template <bool kFeedback>
__global__ void __launch_bounds__(cuda::kThreads) second_kernel(const Batch<TopkParams> batch) {
  const TopkParams args = tensor_of_block(batch);
  __shared__ uint32_t bins[kBins];
  const Share<kFeedback> share(args, {args.in, args.residual, args.numel});
  const Digit first = find_digit(share.bins, static_cast<uint32_t>(args.k));
  const bool is_void = any_beyond(share.bins, void_bits(static_cast<Values>(args.values)));
  if (leads(args)) {
    share.digit[0] = first;
    share.scratch.state->is_void = is_void ? 1 : 0;
  }
  if (is_void) {
    for (size_t i = share.range.begin + lane_of_warp(); kFeedback && i < share.range.end;
         i += cuda::kLanes) {
      args.new_residual[i] = args.residual[i];
    }
    return;
  }
  clear_bins(bins);
  const uint2 counted =
      share.range.count_second(first.bin, bins, kFeedback ? args.new_residual : nullptr);
  if (share.there() && lane_of_warp() == 0) share.scratch.counted[share.warp] = counted;
  add_bins(bins, share.bins + kBins);
}

__global__ void __launch_bounds__(cuda::kThreads) third_kernel(const Batch<TopkParams> batch) {
  const TopkParams args = tensor_of_block(batch);
  __shared__ uint32_t bins[kBins];
  const Share<false> share = later_share(args);
  if (share.scratch.state->is_void) return;
  const Digit first = share.digit[0];
  const Digit second = find_digit(share.bins + kBins, first.place);
  const uint32_t prefix = first.bin << 11 | second.bin;
  const uint2 counted = share.there() ? share.scratch.counted[share.warp] : uint2{0, 0};
  clear_bins(bins);
  share.range.count_third(prefix, counted, bins);
  add_bins(bins, share.bins + 2 * kBins);
  if (leads(args)) share.digit[1] = {prefix, second.place};
}

/// Finds the cut and counts around it.
__global__ void __launch_bounds__(cuda::kThreads) count_kernel(const Batch<TopkParams> batch) {
  const TopkParams args = tensor_of_block(batch);
  const Share<false> share = later_share(args);
  if (share.scratch.state->is_void) return;
  const Digit two = share.digit[1];
  const Digit third = find_digit(share.bins + 2 * kBins, two.place);
  const Threshold cut{two.bin << kSecondShift | third.bin, third.place};
  if (share.there()) {
    const uint2 around = share.range.count_around(cut.bits, share.scratch.counted[share.warp]);
    if (threadIdx.x % cuda::kLanes == 0) share.scratch.around[share.warp] = around;
  }
  if (leads(args)) share.scratch.state->cut = cut;
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
  const State& state = *share.scratch.state;
  if (state.is_void || !share.there()) return;
  const uint2 counted = share.scratch.counted[share.warp],
              before = share.scratch.around[share.warp];
  if (share.range.holds(counted)) {
    choose_of(share.range.slot, counted.x + counted.y, state.cut, before, share.scratch.chosen);
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
