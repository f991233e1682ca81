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

static_assert(kChunk == cuda::kWarps * kStep);
/// Candidates of a record that are ranked; where there are more, digits are counted.
constexpr uint32_t kRanked = 1024;

/// Values of a record that may be among the k largest, and then those that are.
struct Ranking {
  alignas(16) uint32_t bits[kRanked];
  uint32_t place[kRanked];
  float p[kRanked];
  uint32_t index[kRanked];
};

/// Puts the values from magnitude `least` on into `to`, in the order of their indices, and returns
/// how many there are. If they are more than kRanked, the rest is missing. Called by all threads.
__device__ __forceinline__ uint32_t collect(const cuda::Vector<float> (&p)[kRows], uint32_t least,
                                            Ranking& to) {
  __shared__ uint32_t sums[cuda::kWarps];
  uint32_t mine[kRows], counts = 0;  // a bit for each value; a byte for each row
#pragma unroll
  for (int row = 0; row < kRows; row++) {
    mine[row] = 0;
    for (int k = 0; k < cuda::kVector; k++) {
      mine[row] |= magnitude_bits(p[row].v[k]) >= least ? 1u << k : 0;
    }
    counts |= static_cast<uint32_t>(__popc(mine[row])) << 8 * row;
  }
  uint32_t before = sum_of_lanes_up_to(counts);  // at most 128 of a row
  const uint32_t rows = __shfl_sync(kAll, before, cuda::kLanes - 1);
  before -= counts;
  uint32_t sum = 0;
  for (int row = 0; row < kRows; row++) sum += rows >> 8 * row & 0xff;
  if (lane_of_warp() == 0) sums[warp_of_block()] = sum;
  __syncthreads();
  uint32_t first = 0, all = 0;
  for (uint32_t warp = 0; warp < cuda::kWarps; warp++) {
    if (warp == warp_of_block()) first = all;
    all += sums[warp];
  }
#pragma unroll
  for (int row = 0; row < kRows; row++) {
    uint32_t at = first + (before >> 8 * row & 0xff);
    for (int k = 0; k < cuda::kVector && mine[row] != 0; k++) {
      if ((mine[row] >> k & 1) == 0 || at >= kRanked) continue;
      to.bits[at] = float_bits(p[row].v[k]);
      to.place[at++] = warp_of_block() * static_cast<uint32_t>(kStep) + row * cuda::kRow +
                       lane_of_warp() * cuda::kVector + k;
    }
    first += rows >> 8 * row & 0xff;
  }
  if (threadIdx.x < cuda::kLanes && all + threadIdx.x < kRanked) to.bits[all + threadIdx.x] = 0;
  __syncthreads();
  return all;
}

/// Ranks `count` candidates and puts the k largest, of equal ones the first, into p and index.
/// Called by all threads.
__device__ __forceinline__ void rank(uint32_t count, uint32_t k, Ranking& in) {
  __shared__ uint32_t chosen[kRanked / cuda::kLanes];
  for (uint32_t first = warp_of_block() * cuda::kLanes; first < count; first += cuda::kThreads) {
    const uint32_t mine = in.bits[first + lane_of_warp()] & 0x7fffffffu;
    uint32_t above = 0, equal = 0;
    for (uint32_t i = 0; i < count; i += cuda::kVector) {
      const auto others = *reinterpret_cast<const cuda::Vector<uint32_t>*>(in.bits + i);
      const uint32_t least = i < first ? mine : mine + 1;  // equal ones before come first
      for (int j = 0; j < cuda::kVector; j++) above += (others.v[j] & 0x7fffffffu) >= least;
    }
#pragma unroll
    for (int lane = 0; lane < cuda::kLanes; lane++) {
      equal |= (__shfl_sync(kAll, mine, lane) == mine ? 1u : 0u) << lane;
    }
    above += __popc(equal & lanes_below());
    const uint32_t all = __ballot_sync(kAll, first + lane_of_warp() < count && above < k);
    if (lane_of_warp() == 0) chosen[first / cuda::kLanes] = all;
  }
  __syncthreads();
  for (uint32_t first = warp_of_block() * cuda::kLanes; first < count; first += cuda::kThreads) {
    uint32_t at = __popc(chosen[first / cuda::kLanes] & lanes_below());
    for (uint32_t i = 0; i < first / cuda::kLanes; i++) at += __popc(chosen[i]);
    if ((chosen[first / cuda::kLanes] >> lane_of_warp() & 1) == 0) continue;
    in.p[at] = bits_float(in.bits[first + lane_of_warp()]);
    in.index[at] = in.place[first + lane_of_warp()];
  }
  __syncthreads();
}

/// Finds the chosen values by all of their digits, and stores the residuals of the others. `first`
/// counts the first digits. Called by all threads.
template <bool kFeedback>
__device__ __forceinline__ void choose_by_digits(const WarpRange<kFeedback>& range, uint32_t k,
                                                 uint32_t* bins, const Chosen& chosen,
                                                 float* new_residual) {
  __shared__ uint2 around[cuda::kWarps];
  clear_bins(bins);
  range.count_first(bins);
  __syncthreads();
  const Digit first = find_digit(bins, k);
  clear_bins(bins);
  const uint2 counted = range.count_second(first.bin, bins, nullptr);
  __syncthreads();
  const Digit second = find_digit(bins, first.place);
  clear_bins(bins);
  const uint32_t prefix = first.bin << 11 | second.bin;
  range.count_third(prefix, counted, bins);
  __syncthreads();
  const Digit third = find_digit(bins, second.place);
  const Threshold cut{prefix << kSecondShift | third.bin, third.place};

  const uint2 mine = range.count_around(cut.bits, counted);
  if (lane_of_warp() == 0) around[warp_of_block()] = mine;
  __syncthreads();
  uint2 before{0, 0};
  for (uint32_t warp = 0; warp < warp_of_block(); warp++) {
    before.x += around[warp].x;
    before.y += around[warp].y;
  }
  choose(range, cut, before, chosen, new_residual);
  __syncthreads();
}

/// The values are read once, into registers. The k-th largest of the maxima of four neighbours is
/// no larger than the k-th largest value, and not much smaller: the values from its first digit on
/// are ranked.
template <bool kFeedback>
__global__ void __launch_bounds__(cuda::kThreads) encode_chunks(const Batch<TopkParams> batch) {
  const TopkParams args = tensor_of_block(batch);
  __shared__ uint32_t bins[kBins];
  __shared__ Ranking ranking;
  const Chunk chunk(args);
  const Record& record = chunk.record;
  const auto k = static_cast<uint32_t>(record.k);
  const float* residual = kFeedback ? args.residual + chunk.first : nullptr;
  float* new_residual = kFeedback ? args.new_residual + chunk.first : nullptr;
  const Input<kFeedback> from{args.in + chunk.first, residual, record.n};
  const size_t begin = warp_of_block() * kStep;

  cuda::Vector<float> p[kRows];
  from.load(begin, p);
  uint32_t top[kRows], all = 0;
#pragma unroll
  for (int row = 0; row < kRows; row++) {
    top[row] = 0;
    for (int j = 0; j < cuda::kVector; j++) top[row] = max(top[row], magnitude_bits(p[row].v[j]));
    all = max(all, top[row]);
  }
  const bool is_void = __syncthreads_or(all >= void_bits(record.values)) != 0;
  Chosen chosen{ranking.p, ranking.index, kRanked};
  if (is_void) {
    for (size_t i = threadIdx.x; kFeedback && i < record.n; i += cuda::kThreads) {
      new_residual[i] = residual[i];
    }
  } else {
    uint32_t count = kRanked + 1;
    if (k <= kRanked) {
      clear_bins(bins);
#pragma unroll
      for (int row = 0; row < kRows; row++) atomicAdd(bins + (top[row] >> kFirstShift), 1u);
      __syncthreads();
      count = collect(p, find_digit(bins, k).bin << kFirstShift, ranking);
    }
    if (count <= kRanked) {
      for (int row = 0; kFeedback && row < kRows; row++) {
        const size_t i = begin + row * cuda::kRow + lane_of_warp() * cuda::kVector;
        const size_t left = i < record.n ? record.n - i : 0;
        store_four(p[row], i, left < cuda::kVector ? static_cast<int>(left) : cuda::kVector,
                   new_residual);
      }
      rank(count, k, ranking);
    } else {
      __syncthreads();  // all have read what collect() wrote
      chosen = Scratch(args, true).chosen;
      chosen.p += block_of(args) * Layout::rounded(args.k);
      chosen.index += block_of(args) * Layout::rounded(args.k);
      const size_t end = begin + kStep < record.n ? begin + kStep : record.n;
      const WarpRange<kFeedback> range{from, begin, end, {}};  // without a slot: it is read again
      choose_by_digits(range, k, bins, chosen, new_residual);
    }
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
               PYCOMM_KERNEL(topk::second_kernel<true>), PYCOMM_KERNEL(topk::third_kernel),
               PYCOMM_KERNEL(topk::count_kernel), PYCOMM_KERNEL(topk::choose_kernel),
               PYCOMM_KERNEL(topk::pack_kernel<false>), PYCOMM_KERNEL(topk::pack_kernel<true>),
               PYCOMM_KERNEL(topk::fill_kernel<false>), PYCOMM_KERNEL(topk::fill_kernel<true>),
               PYCOMM_KERNEL(topk::scatter_kernel<false>),
               PYCOMM_KERNEL(topk::scatter_kernel<true>), PYCOMM_KERNEL(topk::clear_kernel),
               PYCOMM_KERNEL(topk::scan_kernel), PYCOMM_KERNEL(topk::check_kernel));

}  // namespace pycomm::codecs
