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
/// Candidates of a record that are ranked; where there are more, the cut is searched bit by bit.
constexpr uint32_t kRanked = 1024;

/// The values of a record that a thread has, as Input::load() gives them.
struct Mine {
  cuda::Vector<float> p[kRows];

  __device__ uint32_t bits(int row, int k) const { return magnitude_bits(p[row].v[k]); }
  __device__ static uint32_t index(int row, int k) {
    return warp_of_block() * static_cast<uint32_t>(kStep) + row * cuda::kRow +
           lane_of_warp() * cuda::kVector + k;
  }
  /// Returns four bits of each row, in a byte: those for which f(row, k) is true.
  template <typename F>
  __device__ __forceinline__ static uint32_t where(const F& f) {
    uint32_t mask = 0;
#pragma unroll
    for (int row = 0; row < kRows; row++) {
      for (int k = 0; k < cuda::kVector; k++) mask |= f(row, k) ? 1u << (8 * row + k) : 0;
    }
    return mask;
  }
};

/// Returns the sum of the warps before this one, and of all. Called by all threads.
__device__ __forceinline__ uint2 sums_of_block(uint32_t sum_of_this_warp) {
  __shared__ uint32_t sums[cuda::kWarps];
  __syncthreads();  // all have read the previous ones
  if (lane_of_warp() == 0) sums[warp_of_block()] = sum_of_this_warp;
  __syncthreads();
  uint2 sum{0, 0};
  for (uint32_t warp = 0; warp < cuda::kWarps; warp++) {
    if (warp == warp_of_block()) sum.x = sum.y;
    sum.y += sums[warp];
  }
  return sum;
}

/// Puts the values of a mask into `to`, in the order of their indices, and returns how many there
/// are, also of those that have no room. Called by all threads.
__device__ __forceinline__ uint32_t collect(const Mine& mine, uint32_t mask, const Chosen& to) {
  uint32_t counts = 0;  // a byte for each row
#pragma unroll
  for (int row = 0; row < kRows; row++) counts |= __popc(mask >> 8 * row & 15) << 8 * row;
  uint32_t before = sum_of_lanes_up_to(counts);  // at most 128 of a row
  const uint32_t rows = __shfl_sync(kAll, before, cuda::kLanes - 1);
  before -= counts;
  uint32_t sum = 0;
  for (int row = 0; row < kRows; row++) sum += rows >> 8 * row & 0xff;
  const uint2 sums = sums_of_block(sum);
  uint32_t first = sums.x;
#pragma unroll
  for (int row = 0; row < kRows; row++) {
    uint32_t at = first + (before >> 8 * row & 0xff);
    for (int k = 0; k < cuda::kVector && (mask >> 8 * row & 15) != 0; k++) {
      if ((mask >> (8 * row + k) & 1) == 0 || at >= to.room) continue;
      to.p[at] = mine.p[row].v[k];
      to.index[at++] = Mine::index(row, k);
    }
    first += rows >> 8 * row & 0xff;
  }
  __syncthreads();
  return sums.y;
}

/// Ranks `count` candidates and puts the k largest, of equal ones the first, into `to`. Called by
/// all threads.
__device__ __forceinline__ void rank(const Chosen& in, uint32_t count, uint32_t k,
                                     const Chosen& to) {
  __shared__ uint32_t chosen[kRanked / cuda::kLanes];
  for (uint32_t first = warp_of_block() * cuda::kLanes; first < count; first += cuda::kThreads) {
    const uint32_t j = first + lane_of_warp();
    const uint32_t mine = j < count ? magnitude_bits(in.p[j]) : 0;
    uint32_t above = 0, equal = 0;
    for (uint32_t i = 0; i < count; i += cuda::kVector) {
      const auto others = *reinterpret_cast<const cuda::Vector<float>*>(in.p + i);
      const uint32_t least = i < first ? mine : mine + 1;  // equal ones before come first
      for (uint32_t n = 0; n < cuda::kVector; n++) {
        above += i + n < count && magnitude_bits(others.v[n]) >= least;
      }
    }
#pragma unroll
    for (int lane = 0; lane < cuda::kLanes; lane++) {
      equal |= (__shfl_sync(kAll, mine, lane) == mine ? 1u : 0u) << lane;
    }
    above += __popc(equal & lanes_below());
    const uint32_t all = __ballot_sync(kAll, j < count && above < k);
    if (lane_of_warp() == 0) chosen[first / cuda::kLanes] = all;
  }
  __syncthreads();
  for (uint32_t j = threadIdx.x; j < count; j += cuda::kThreads) {
    const uint32_t group = chosen[j / cuda::kLanes];
    uint32_t at = __popc(group & lanes_below());
    for (uint32_t i = 0; i < j / cuda::kLanes; i++) at += __popc(chosen[i]);
    if ((group >> lane_of_warp() & 1) == 0) continue;
    to.p[at] = in.p[j];
    to.index[at] = in.index[j];
  }
  __syncthreads();
}

/// Returns the mask of the k largest values, of equal ones the first. Called by all threads.
__device__ __forceinline__ uint32_t search(const Mine& mine, uint32_t k) {
  const auto enough = [&](uint32_t mask) {
    return sums_of_block(sum_of_warp(__popc(mask))).y >= k;
  };
  uint32_t cut = 0, last = kChunk - 1;
  for (uint32_t bit = 1u << 30; bit != 0; bit /= 2) {
    const uint32_t least = cut + bit;
    if (enough(Mine::where([&](int r, int c) { return mine.bits(r, c) >= least; }))) cut = least;
  }
  const auto up_to = [&](uint32_t end) {
    return Mine::where([&](int r, int c) {
      const uint32_t bits = mine.bits(r, c);
      return bits > cut || (bits == cut && Mine::index(r, c) <= end);
    });
  };
  for (uint32_t bit = kChunk / 2; bit != 0; bit /= 2) {
    if (enough(up_to(last - bit))) last -= bit;
  }
  return up_to(last);
}

/// The values are read once, into registers. The k-th largest of the maxima of four neighbours is
/// no larger than the k-th largest value, and not much smaller: the values from its first digit on
/// are ranked.
template <bool kFeedback>
__global__ void __launch_bounds__(cuda::kThreads) encode_chunks(const Batch<TopkParams> batch) {
  const TopkParams args = tensor_of_block(batch);
  alignas(16) __shared__ uint32_t bins[kBins];  // and then candidates
  __shared__ float values[kChunk];
  __shared__ uint32_t indices[kChunk];
  const Chosen candidates{reinterpret_cast<float*>(bins), bins + kRanked, kRanked};
  const Chosen chosen{values, indices, kChunk};
  static_assert(kBins == 2 * kRanked);
  const Chunk chunk(args);
  const Record& record = chunk.record;
  const auto k = static_cast<uint32_t>(record.k);
  const float* residual = kFeedback ? args.residual + chunk.first : nullptr;
  float* new_residual = kFeedback ? args.new_residual + chunk.first : nullptr;

  Mine mine;
  Input<kFeedback>{args.in + chunk.first, residual, record.n}.load(warp_of_block() * kStep, mine.p);
  uint32_t top[kRows], all = 0;
#pragma unroll
  for (int row = 0; row < kRows; row++) {
    top[row] = 0;
    for (int j = 0; j < cuda::kVector; j++) top[row] = max(top[row], mine.bits(row, j));
    all = max(all, top[row]);
  }
  const bool is_void = __syncthreads_or(all >= void_bits(record.values)) != 0;
  if (is_void) {
    for (size_t i = threadIdx.x; kFeedback && i < record.n; i += cuda::kThreads) {
      new_residual[i] = residual[i];
    }
  } else {
    for (int row = 0; kFeedback && row < kRows; row++) {
      const size_t i = Mine::index(row, 0), left = i < record.n ? record.n - i : 0;
      store_four(mine.p[row], i, left < cuda::kVector ? static_cast<int>(left) : cuda::kVector,
                 new_residual);
    }
    uint32_t count = kRanked + 1;
    if (k <= kRanked) {
      clear_bins(bins);
#pragma unroll
      for (int row = 0; row < kRows; row++) atomicAdd(bins + (top[row] >> kFirstShift), 1u);
      __syncthreads();
      const uint32_t least = find_digit(bins, k).bin << kFirstShift;
      count = collect(mine, Mine::where([&](int r, int c) { return mine.bits(r, c) >= least; }),
                      candidates);
    }
    if (count <= kRanked) {
      rank(candidates, count, k, chosen);
    } else {
      collect(mine, search(mine, k), chosen);
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
