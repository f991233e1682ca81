// Positions of threads, and sums over the lanes of a warp and over all threads of a block. Compiled
// by nvcc and NVRTC.
#pragma once
#include "codecs/base/batch.h"
#include "core/cuda_vector.h"
#include "core/types.h"

namespace pycomm::codecs {

constexpr uint32_t kAll = ~0u;  ///< all lanes of a warp

__device__ __forceinline__ uint32_t lane_of_warp() { return threadIdx.x % cuda::kLanes; }
__device__ __forceinline__ uint32_t warp_of_block() { return threadIdx.x / cuda::kLanes; }

// Lets a kernel read the residual that it would write, and the other way round.
template <typename Params>
__device__ __forceinline__ auto swap_residuals(Params& args, int)
    -> decltype(args.swapped, void()) {
  args.swapped = 1;  // with both addresses exchanged here, sign spilled registers
}
template <typename Params>
__device__ __forceinline__ auto swap_residuals(Params& args, int)
    -> decltype(args.scratch, args.new_residual, void()) {
  float* const fresh = args.new_residual;
  args.new_residual = const_cast<float*>(args.residual);
  args.residual = fresh;
}
template <typename Params>
__device__ __forceinline__ auto swap_residuals(Params& args, int)
    -> decltype(args.other_side, void()) {
  args.stored = args.other_side;
}
/// True if residuals are read where they would be written; see BatchHead.
__device__ __forceinline__ bool is_swapped(const float* swapped) {
  return swapped != nullptr && *swapped != 0.0f;
}

/// Returns the arguments for the tensor on which this block of threads works, where they lie: their
/// residuals are not swapped.
template <typename Params>
__device__ __forceinline__ const Params& place_of_block(const Batch<Params>& batch) {
  uint64_t found = 0, end = batch.head.count;
  while (end - found > 1) {
    const uint64_t middle = (found + end) / 2;
    (batch.tensors[middle].blocks.first <= blockIdx.x ? found : end) = middle;
  }
  return batch.tensors[found];
}
template <typename Params>
__device__ __forceinline__ auto tensor_of_block(const Batch<Params>& batch, int)
    -> decltype(swap_residuals(const_cast<Params&>(batch.tensors[0]), 0), Params()) {
  Params args = place_of_block(batch);
  if (is_swapped(batch.head.swapped)) swap_residuals(args, 0);
  return args;
}
template <typename Params>
__device__ __forceinline__ const Params& tensor_of_block(const Batch<Params>& batch, long) {
  return place_of_block(batch);
}
/// Returns them with the residuals that this step reads and writes: a copy, if there are any.
template <typename Params>
__device__ __forceinline__ decltype(auto) tensor_of_block(const Batch<Params>& batch) {
  return tensor_of_block(batch, 0);
}
// Positions among the blocks, warps and threads that work on a tensor.
template <typename Params>
__device__ __forceinline__ uint32_t block_of(const Params& args) {
  return blockIdx.x - args.blocks.first;
}
template <typename Params>
__device__ __forceinline__ size_t warp_of(const Params& args) {
  return size_t{block_of(args)} * cuda::kWarps + warp_of_block();
}
template <typename Params>
__device__ __forceinline__ bool leads(const Params& args) {
  return block_of(args) == 0 && threadIdx.x == 0;
}

__device__ __forceinline__ uint32_t lanes_below() { return (1u << lane_of_warp()) - 1; }

__device__ __forceinline__ uint32_t sum_of_warp(uint32_t x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  return __reduce_add_sync(kAll, x);
#else
#pragma unroll
  for (int lane = 1; lane < cuda::kLanes; lane *= 2) x += __shfl_xor_sync(kAll, x, lane);
  return x;
#endif
}
__device__ __forceinline__ uint32_t max_of_warp(uint32_t x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  return __reduce_max_sync(kAll, x);
#else
#pragma unroll
  for (int lane = 1; lane < cuda::kLanes; lane *= 2) x = max(x, __shfl_xor_sync(kAll, x, lane));
  return x;
#endif
}
/// Returns the sum of the lanes up to this one.
__device__ __forceinline__ uint32_t sum_of_lanes_up_to(uint32_t x) {
#pragma unroll
  for (int lane = 1; lane < cuda::kLanes; lane *= 2) {
    const uint32_t other = __shfl_up_sync(kAll, x, lane);
    if (lane_of_warp() >= static_cast<uint32_t>(lane)) x += other;
  }
  return x;
}

/// Replaces pairs of counts by the sums of those before them, and returns the sum of all. Called by
/// all threads of a grid of one block; later code may read the sums after a barrier.
__device__ inline uint2 scan_in_place(uint2* counts, size_t n) {
  __shared__ uint2 sums[cuda::kThreads];
  const size_t share = (n + cuda::kThreads - 1) / cuda::kThreads;
  const size_t begin = threadIdx.x * share < n ? threadIdx.x * share : n;
  const size_t end = begin + share < n ? begin + share : n;
  uint2 sum{0, 0};
#pragma unroll 8
  for (size_t i = begin; i < end; i++) {
    sum.x += counts[i].x;
    sum.y += counts[i].y;
  }
  sums[threadIdx.x] = sum;
  __syncthreads();
  uint2 before{0, 0}, total{0, 0};
  for (uint32_t other = 0; other < cuda::kThreads; other++) {
    if (other == threadIdx.x) before = total;
    total.x += sums[other].x;
    total.y += sums[other].y;
  }
#pragma unroll 8
  for (size_t i = begin; i < end; i++) {
    const uint2 here = counts[i];
    counts[i] = before;
    before.x += here.x;
    before.y += here.y;
  }
  return total;
}

}  // namespace pycomm::codecs
