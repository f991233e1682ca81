// topk of a whole tensor in CUDA: kernels that run one after the other, each over all values or
// over all that travel, and share scratch memory. Encoding reads the values three times: for the
// first digits, for the candidates, and to put the chosen values in order. A range whose candidates
// do not fit in its slot is read up to twice more. Compiled by nvcc and NVRTC.
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

  __device__ explicit Share(const TopkParams& args) : scratch(args, false) {
    warp = warp_of(args);
    bins = scratch.bins;
    digit = scratch.state->digit;
    range.from = {args.in, args.residual, args.numel};
    range.begin = warp * kTile;
    range.end = range.begin + kTile < range.from.n ? range.begin + kTile : range.from.n;
    range.slot = scratch.slots + warp * kSlot;
    range.room = kSlot;
  }

  __device__ bool there() const { return range.begin < range.from.n; }
};

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
  const Share<kFeedback> share(args);
  clear_bins(bins);
  share.range.count_first(bins);
  add_bins(bins, share.bins);
}

template <bool kFeedback>
__global__ void __launch_bounds__(cuda::kThreads) second_kernel(const Batch<TopkParams> batch) {
  const TopkParams args = tensor_of_block(batch);
  __shared__ uint32_t bins[kBins];
  const Share<kFeedback> share(args);
  const Digit first = find_digit(share.bins, static_cast<uint32_t>(args.k));
  clear_bins(bins);
  const uint2 counted = share.range.count_second(first.bin, bins);
  if (share.there() && threadIdx.x % cuda::kLanes == 0) share.scratch.counted[share.warp] = counted;
  add_bins(bins, share.bins + kBins);
  if (!leads(args)) return;
  share.digit[0] = first;
  const bool is_void = any_beyond(share.bins, void_bits(static_cast<Values>(args.values)));
  share.scratch.state->is_void = is_void ? 1 : 0;
}

/// Two blocks on a multiprocessor are enough: for five, ptxas would spill a register.
template <bool kFeedback>
__global__ void __launch_bounds__(cuda::kThreads, 2) third_kernel(const Batch<TopkParams> batch) {
  const TopkParams args = tensor_of_block(batch);
  __shared__ uint32_t bins[kBins];
  const Share<kFeedback> share(args);
  const Digit first = share.digit[0];
  const Digit second = find_digit(share.bins + kBins, first.place);
  const uint32_t prefix = first.bin << 11 | second.bin;
  const uint32_t candidates = share.there() ? share.scratch.counted[share.warp].y : 0;
  clear_bins(bins);
  share.range.count_third(prefix, candidates, bins);
  add_bins(bins, share.bins + 2 * kBins);
  if (leads(args)) share.digit[1] = {prefix, second.place};
}

/// Finds the cut and counts around it.
template <bool kFeedback>
__global__ void __launch_bounds__(cuda::kThreads) count_kernel(const Batch<TopkParams> batch) {
  const TopkParams args = tensor_of_block(batch);
  const Share<kFeedback> share(args);
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
  scan_in_place(Scratch(args, false).around, (args.numel + kTile - 1) / kTile);
}

template <bool kFeedback>
__global__ void __launch_bounds__(cuda::kThreads) choose_kernel(const Batch<TopkParams> batch) {
  const TopkParams args = tensor_of_block(batch);
  const Share<kFeedback> share(args);
  const State& state = *share.scratch.state;
  if (!share.there()) return;
  if (state.is_void) {
    if constexpr (kFeedback) {
      for (size_t i = share.range.begin + threadIdx.x % cuda::kLanes; i < share.range.end;
           i += cuda::kLanes) {
        args.new_residual[i] = args.residual[i];
      }
    }
    return;
  }
  choose(share.range, state.cut, share.scratch.around[share.warp], share.scratch.chosen,
         args.new_residual);
}

template <bool kFeedback>
__global__ void __launch_bounds__(cuda::kThreads) pack_kernel(const Batch<TopkParams> batch) {
  const TopkParams args = tensor_of_block(batch);
  const Scratch scratch(args, false);
  const Record record = record_of(args, args.numel, args.k);
  const size_t group = warp_of(args);
  if (group * kGroup >= record.k) return;
  write_group<kFeedback>(record, args.payload, group, scratch.chosen, scratch.state->is_void != 0,
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
