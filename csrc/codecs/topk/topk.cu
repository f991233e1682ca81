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
/// Magnitudes are counted by how far they are below the largest one, in steps of 1/32 octave; the
/// last bin has all that are further away.
constexpr uint32_t kDistances = 256, kDistanceShift = 18;

/// Memory of a block of threads.
struct Shared {
  float p[kChunk];         ///< the values of the record, as Input::load() gives them
  uint32_t keys[kRanked];  ///< magnitudes of the candidates, in the order of their indices
  uint32_t bins[kDistances];
  uint32_t sums[cuda::kWarps];
  uint32_t kept[kRanked / cuda::kLanes];  ///< a bit for each candidate that is chosen
  uint16_t candidates[kRanked];           ///< their indices
  uint16_t chosen[kChunk];
};
__device__ __forceinline__ Shared& shared() {
  alignas(16) __shared__ Shared memory;
  return memory;
}

/// Returns the index of the first of a thread's four neighbours in a row.
__device__ __forceinline__ uint32_t index_in(int row) {
  return warp_of_block() * static_cast<uint32_t>(kStep) + row * cuda::kRow +
         lane_of_warp() * cuda::kVector;
}

/// Returns the sum of the warps before this one, and of all. Called by all threads.
__device__ __forceinline__ uint2 sums_of_block(uint32_t sum_of_this_warp) {
  __syncthreads();  // all have read the previous ones
  if (lane_of_warp() == 0) shared().sums[warp_of_block()] = sum_of_this_warp;
  __syncthreads();
  uint2 sum{0, 0};
  for (uint32_t warp = 0; warp < cuda::kWarps; warp++) {
    if (warp == warp_of_block()) sum.x = sum.y;
    sum.y += shared().sums[warp];
  }
  return sum;
}

/// Calls store(place, index) for the values of a mask, which are numbered in the order of their
/// indices, and returns how many there are. Called by all threads.
template <typename F>
__device__ __forceinline__ uint32_t collect(uint32_t mask, const F& store) {
  const RowCounts counts(mask);
  const uint2 sums = sums_of_block(counts.sum());
  uint32_t first = sums.x;
#pragma unroll
  for (int row = 0; row < kRows; row++) {
    uint32_t at = first + (counts.before >> 8 * row & 0xff);
#pragma unroll 1
    for (uint32_t left = mask >> cuda::kVector * row & 15; left != 0; left &= left - 1) {
      store(at++, index_in(row) + __popc((left & -left) - 1));
    }
    first += counts.all >> 8 * row & 0xff;
  }
  __syncthreads();
  return sums.y;
}

/// Returns a magnitude of which at least k values are no smaller, and not many more: the k-th
/// largest of the maxima of four or of sixteen values, rounded down. `top` has those of four, and
/// `largest` is the largest of all. Called by all threads, after a barrier since the bins were
/// cleared.
__device__ __forceinline__ uint32_t lower_bound(const uint32_t (&top)[kRows], uint32_t largest,
                                                uint32_t k) {
  const auto count = [&](uint32_t magnitude) {
    const uint32_t distance = (largest >> kDistanceShift) - (magnitude >> kDistanceShift);
    atomicAdd(shared().bins + (distance < kDistances ? distance : kDistances - 1), 1u);
  };
  if (k <= cuda::kThreads / 2) {
    count(max(max(top[0], top[1]), max(top[2], top[3])));
  } else {
    for (const uint32_t each : top) count(each);
  }
  __syncthreads();
  // Each warp finds the bin.
  constexpr uint32_t kEach = kDistances / cuda::kLanes;
  const uint32_t* const bins = shared().bins + lane_of_warp() * kEach;
  uint32_t mine = 0;
#pragma unroll
  for (uint32_t i = 0; i < kEach; i++) mine += bins[i];
  uint32_t sum = sum_of_lanes_up_to(mine);
  const uint32_t lane = __popc(~__ballot_sync(kAll, sum >= k));  // the first that reaches k
  sum -= mine;
  uint32_t distance = lane_of_warp() * kEach;
#pragma unroll
  for (uint32_t i = 0; i < kEach; i++) {
    sum += bins[i];
    distance += sum < k ? 1 : 0;
  }
  distance = __shfl_sync(kAll, distance, static_cast<int>(lane));
  return distance < kDistances - 1 ? ((largest >> kDistanceShift) - distance) << kDistanceShift : 0;
}

/// Ranks `count` candidates and chooses the k largest, of equal ones the first. Called by all
/// threads.
__device__ __forceinline__ void rank(uint32_t count, uint32_t k) {
  Shared& at = shared();
#pragma unroll 1
  for (uint32_t first = warp_of_block() * cuda::kLanes; first < count; first += cuda::kThreads) {
    const uint32_t j = first + lane_of_warp();
    const uint32_t mine = j < count ? at.keys[j] : 0;
    uint32_t larger = 0;
    const auto others = [&](uint32_t i) {
      return *reinterpret_cast<const cuda::Vector<uint32_t>*>(at.keys + i);
    };
    // Equal ones before come first.
#pragma unroll 1
    for (uint32_t i = 0; i < first; i += cuda::kVector) {
      for (const uint32_t other : others(i).v) larger += other >= mine;
    }
#pragma unroll 1
    for (uint32_t i = first; i < count; i += cuda::kVector) {
      const cuda::Vector<uint32_t> four = others(i);
      for (uint32_t n = 0; n < cuda::kVector; n++) {
        larger += i + n < count && four.v[n] >= (i + n < j ? mine : mine + 1);
      }
    }
    const uint32_t all = __ballot_sync(kAll, j < count && larger < k);
    if (lane_of_warp() == 0) at.kept[first / cuda::kLanes] = all;
  }
  __syncthreads();
#pragma unroll 1
  for (uint32_t j = threadIdx.x; j < count; j += cuda::kThreads) {
    const uint32_t group = at.kept[j / cuda::kLanes];
    uint32_t place = __popc(group & lanes_below());
#pragma unroll 1
    for (uint32_t i = 0; i < j / cuda::kLanes; i++) place += __popc(at.kept[i]);
    if ((group >> lane_of_warp() & 1) != 0) at.chosen[place] = at.candidates[j];
  }
  __syncthreads();
}

/// Returns the mask of the k largest values, of equal ones the first. Called by all threads.
__device__ __forceinline__ uint32_t search(uint32_t k) {
  const auto where = [&](const auto& f) {
    uint32_t mask = 0;
#pragma unroll 1
    for (uint32_t bit = 0; bit < kBits; bit++) {
      const uint32_t index = index_in(bit / cuda::kVector) + bit % cuda::kVector;
      mask |= f(magnitude_bits(shared().p[index]), index) ? 1u << bit : 0;
    }
    return mask;
  };
  const auto enough = [&](uint32_t mask) {
    return sums_of_block(sum_of_warp(__popc(mask))).y >= k;
  };
  uint32_t cut = 0, last = kChunk - 1;
  for (uint32_t bit = 1u << 30; bit != 0; bit /= 2) {
    const uint32_t least = cut + bit;
    if (enough(where([&](uint32_t bits, uint32_t) { return bits >= least; }))) cut = least;
  }
  const auto up_to = [&](uint32_t end) {
    return where(
        [&](uint32_t bits, uint32_t index) { return bits > cut || (bits == cut && index <= end); });
  };
  for (uint32_t bit = kChunk / 2; bit != 0; bit /= 2) {
    if (enough(up_to(last - bit))) last -= bit;
  }
  return up_to(last);
}

/// The values are read once. Those that a lower bound leaves are ranked.
template <bool kFeedback>
__global__ void __launch_bounds__(cuda::kThreads, 3) encode_chunks(const Batch<TopkParams> batch) {
  const TopkParams args = tensor_of_block(batch);
  Shared& at = shared();
  const Chunk chunk(args);
  const Record& record = chunk.record;
  const auto k = static_cast<uint32_t>(record.k);
  const float* residual = kFeedback ? args.residual + chunk.first : nullptr;
  float* new_residual = kFeedback ? args.new_residual + chunk.first : nullptr;

  cuda::Vector<float> p[kRows];
  Input<kFeedback>{args.in + chunk.first, residual, record.n}.load(warp_of_block() * kStep, p);
  uint32_t top[kRows], largest = 0;
#pragma unroll
  for (int row = 0; row < kRows; row++) {
    *reinterpret_cast<cuda::Vector<float>*>(at.p + index_in(row)) = p[row];
    top[row] = 0;
    for (const float each : p[row].v) top[row] = max(top[row], magnitude_bits(each));
    largest = max(largest, top[row]);
  }
  largest = max_of_warp(largest);
  if (lane_of_warp() == 0) at.sums[warp_of_block()] = largest;
  static_assert(kDistances == cuda::kThreads);
  at.bins[threadIdx.x] = 0;
  __syncthreads();
  for (const uint32_t each : at.sums) largest = max(largest, each);

  const bool is_void = largest >= void_bits(record.values);
  if (is_void) {
    for (size_t i = threadIdx.x; kFeedback && i < record.n; i += cuda::kThreads) {
      new_residual[i] = residual[i];
    }
  } else {
    for (int row = 0; kFeedback && row < kRows; row++) {
      const size_t i = index_in(row), left = i < record.n ? record.n - i : 0;
      store_four(p[row], i, left < cuda::kVector ? static_cast<int>(left) : cuda::kVector,
                 new_residual);
    }
    uint32_t count = kRanked + 1;
    if (k <= kRanked) {
      const float least = bits_float(lower_bound(top, largest, k));
      count = collect(reaching(p, least), [&](uint32_t place, uint32_t index) {
        if (place >= kRanked) return;
        at.keys[place] = magnitude_bits(at.p[index]);
        at.candidates[place] = static_cast<uint16_t>(index);
      });
    }
    if (count <= kRanked) {
      rank(count, k);
    } else {
      collect(search(k), [&](uint32_t place, uint32_t index) {
        at.chosen[place] = static_cast<uint16_t>(index);
      });
    }
  }
  for (size_t group = warp_of_block(); group * kGroup < record.k; group += cuda::kWarps) {
    write_group<kFeedback>(
        record, chunk.payload, group,
        [&](size_t j) { return Place{at.p[at.chosen[j]], at.chosen[j]}; }, is_void, residual,
        new_residual);
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
               PYCOMM_KERNEL(topk::decode_chunks<true>), PYCOMM_KERNEL(topk::first_kernel),
               PYCOMM_KERNEL(topk::sample_kernel), PYCOMM_KERNEL(topk::keep_kernel<false>),
               PYCOMM_KERNEL(topk::keep_kernel<true>), PYCOMM_KERNEL(topk::refill_kernel),
               PYCOMM_KERNEL(topk::second_kernel), PYCOMM_KERNEL(topk::third_kernel),
               PYCOMM_KERNEL(topk::count_kernel), PYCOMM_KERNEL(topk::choose_kernel),
               PYCOMM_KERNEL(topk::pack_kernel<false>), PYCOMM_KERNEL(topk::pack_kernel<true>),
               PYCOMM_KERNEL(topk::fill_kernel<false>), PYCOMM_KERNEL(topk::fill_kernel<true>),
               PYCOMM_KERNEL(topk::scatter_kernel<false>),
               PYCOMM_KERNEL(topk::scatter_kernel<true>), PYCOMM_KERNEL(topk::clear_kernel),
               PYCOMM_KERNEL(topk::scan_kernel), PYCOMM_KERNEL(topk::check_kernel));

}  // namespace pycomm::codecs
