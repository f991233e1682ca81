// topk in CUDA. Wire format: docs/wire/topk.md. Compiled by nvcc, or at run time by NVRTC, which
// takes the kernels only.
// With chunks, a block of threads handles a whole record: these kernels are here. A whole tensor
// takes several kernels: topk/whole_cuda.h.
#include "codecs/base/kernels_cuda.h"
#include "codecs/topk/whole_cuda.h"

namespace pycomm::codecs::topk {

// ---------------------------------------------------------------- kernels

/// Record of a block of threads.
struct Chunk {
  size_t first;
  Record record;
  uint8_t* payload;

  __device__ explicit Chunk(const TopkParams& args)
      : first(size_t{block_of(args)} * args.length),
        record(args.numel - first < args.length ? record_of(args, args.numel - first, args.last_k)
                                                : record_of(args, args.length, args.k)),
        payload(args.payload + block_of(args) * record_of(args, args.length, args.k).bytes) {}
};

/// Candidates that a warp keeps: there is room for all of its share.
constexpr uint32_t kChunkSlot = kChunk / cuda::kWarps;

template <bool kFeedback>
__global__ void __launch_bounds__(cuda::kThreads) encode_chunks(const Batch<TopkParams> batch) {
  const TopkParams args = tensor_of_block(batch);
  __shared__ uint32_t bins[kBins];
  __shared__ uint32_t slots[cuda::kWarps * kChunkSlot];
  __shared__ uint2 around[cuda::kWarps];
  const Chunk chunk(args);
  const Record& record = chunk.record;
  const float* residual = kFeedback ? args.residual + chunk.first : nullptr;
  float* new_residual = kFeedback ? args.new_residual + chunk.first : nullptr;
  const Input<kFeedback> from{args.in + chunk.first, residual, record.n};
  const size_t length = args.length / cuda::kWarps, begin = warp_of_block() * length;
  const size_t end = begin + length < record.n ? begin + length : record.n;
  const WarpRange<kFeedback> range{from, begin, end, slots + warp_of_block() * kChunkSlot,
                                   kChunkSlot};

  clear_bins(bins);
  range.count_first(bins);
  __syncthreads();
  const Digit first = find_digit(bins, static_cast<uint32_t>(record.k));
  const bool is_void = any_beyond(bins, void_bits(record.values));
  __syncthreads();
  Chosen chosen = Scratch(args, true).chosen;
  chosen.p += block_of(args) * Layout::rounded(args.k);
  chosen.index += block_of(args) * Layout::rounded(args.k);
  if (is_void) {
    for (size_t i = threadIdx.x; kFeedback && i < record.n; i += cuda::kThreads) {
      new_residual[i] = residual[i];
    }
  } else {
    clear_bins(bins);
    const uint2 counted = range.count_second(first.bin, bins);
    __syncthreads();
    const Digit second = find_digit(bins, first.place);
    clear_bins(bins);
    const uint32_t prefix = first.bin << 11 | second.bin;
    range.count_third(prefix, counted.y, bins);
    __syncthreads();
    const Digit third = find_digit(bins, second.place);
    const Threshold cut{prefix << kSecondShift | third.bin, third.place};

    const uint2 mine = range.count_around(cut.bits, counted);
    if (threadIdx.x % cuda::kLanes == 0) around[warp_of_block()] = mine;
    __syncthreads();
    uint2 before{0, 0};
    for (uint32_t warp = 0; warp < warp_of_block(); warp++) {
      before.x += around[warp].x;
      before.y += around[warp].y;
    }
    choose(range, cut, before, chosen, new_residual);
    __syncthreads();
  }
  for (size_t group = warp_of_block(); group * kGroup < record.k; group += cuda::kWarps) {
    write_group<kFeedback>(record, chunk.payload, group, chosen, is_void, residual, new_residual);
  }
}

template <bool kAdd>
__global__ void __launch_bounds__(cuda::kThreads) decode_chunks(const Batch<TopkParams> batch) {
  const TopkParams args = tensor_of_block(batch);
  const Chunk chunk(args);
  const Record& record = chunk.record;
  const uint8_t* from = chunk.payload;
  float* out = args.out + chunk.first;

  bool fine = true;
  for (size_t j = threadIdx.x; j < record.k; j += cuda::kThreads) {
    if (!index_in_order(record, from, j)) fine = false;
  }
  if (begins_with_nan(from)) fine = false;
  const bool is_void = __syncthreads_or(!fine) != 0;

  if (!kAdd || is_void) {
    const float other = is_void ? bits_float(kNanBits) : 0.0f;
    for (size_t i = threadIdx.x; i < record.n; i += cuda::kThreads) out[i] = other;
  }
  if (is_void) return;
  __syncthreads();
  for (size_t j = threadIdx.x; j < record.k; j += cuda::kThreads) {
    float* to = out + read_index(record, from, j);
    *to = kAdd ? *to + read_value(record, from, j) : read_value(record, from, j);
  }
}

}  // namespace pycomm::codecs::topk

namespace pycomm::codecs {

PYCOMM_KERNELS(topk, PYCOMM_KERNEL(topk::encode_chunks<false>),
               PYCOMM_KERNEL(topk::encode_chunks<true>), PYCOMM_KERNEL(topk::decode_chunks<false>),
               PYCOMM_KERNEL(topk::decode_chunks<true>), PYCOMM_KERNEL(topk::first_kernel<false>),
               PYCOMM_KERNEL(topk::first_kernel<true>), PYCOMM_KERNEL(topk::second_kernel<false>),
               PYCOMM_KERNEL(topk::second_kernel<true>), PYCOMM_KERNEL(topk::third_kernel<false>),
               PYCOMM_KERNEL(topk::third_kernel<true>), PYCOMM_KERNEL(topk::count_kernel<false>),
               PYCOMM_KERNEL(topk::count_kernel<true>), PYCOMM_KERNEL(topk::choose_kernel<false>),
               PYCOMM_KERNEL(topk::choose_kernel<true>), PYCOMM_KERNEL(topk::pack_kernel<false>),
               PYCOMM_KERNEL(topk::pack_kernel<true>), PYCOMM_KERNEL(topk::fill_kernel<false>),
               PYCOMM_KERNEL(topk::fill_kernel<true>), PYCOMM_KERNEL(topk::scatter_kernel<false>),
               PYCOMM_KERNEL(topk::scatter_kernel<true>), PYCOMM_KERNEL(topk::clear_kernel),
               PYCOMM_KERNEL(topk::scan_kernel), PYCOMM_KERNEL(topk::check_kernel));

}  // namespace pycomm::codecs
