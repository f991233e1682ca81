// sign in CUDA. Wire format: docs/wire/sign.md. The arithmetic is in sign.h. Compiled by nvcc, or
// at run time by NVRTC, which takes the kernels only.
#include "codecs/base/bits_cuda.h"
#include "codecs/base/block_cuda.h"
#include "codecs/base/kernels_cuda.h"
#include "codecs/sign.h"

namespace pycomm::codecs::sign {

// ---------------------------------------------------------------- kernels

/// Returns the sum of the magnitudes of the block that begins in `row`: each half of it is added to
/// the other, first whole rows, then lanes, then the values of a lane.
template <int kBlock, int kRows>
__device__ __forceinline__ float sum_magnitudes(const cuda::Vector<float> (&p)[kRows], int row) {
  constexpr int kBlockRows = kBlock > cuda::kRow ? kBlock / cuda::kRow : 1;
  cuda::Vector<float> sum[kBlockRows];
#pragma unroll
  for (int r = 0; r < kBlockRows; r++) {
    for (int k = 0; k < cuda::kVector; k++) {
      sum[r].v[k] = bits_float(magnitude_bits(p[row + r].v[k]));
    }
  }
#pragma unroll
  for (int step = kBlockRows / 2; step > 0; step /= 2) {
#pragma unroll
    for (int r = 0; r < kBlockRows / 2; r++) {
      if (r >= step) continue;
      for (int k = 0; k < cuda::kVector; k++) sum[r].v[k] = sum[r].v[k] + sum[r + step].v[k];
    }
  }
  cuda::Vector<float>& lane = sum[0];
#pragma unroll
  for (int step = cuda::kLanes / 2; step > 0; step /= 2) {
    if (step * cuda::kVector < kBlock) {
#pragma unroll
      for (int k = 0; k < cuda::kVector; k++) {
        const uint32_t other = __shfl_xor_sync(~0u, float_bits(lane.v[k]), step);
        lane.v[k] = lane.v[k] + bits_float(other);
      }
    }
  }
  return (lane.v[0] + lane.v[2]) + (lane.v[1] + lane.v[3]);
}

/// Decodes four bits.
__device__ __forceinline__ cuda::Vector<float> decode_row(uint32_t bits, float scale) {
  cuda::Vector<float> value;
  for (int k = 0; k < cuda::kVector; k++) value.v[k] = dequantize(bits >> k, scale);
  return value;
}

template <int kBlock, bool kFeedback>
__global__ void __launch_bounds__(cuda::kThreads) encode_kernel(const Batch<EncodeParams> batch) {
  const EncodeParams args = tensor_of_block(batch);
  constexpr int kRows = tile_rows(kBlock);
  constexpr int kBlockRows = kBlock > cuda::kRow ? kBlock / cuda::kRow : 1;
  const cuda::Tile<kRows> tile = tile_of<kRows>(args);
  if (tile.empty()) return;

  cuda::Vector<float> p[kRows];
  load_values<kFeedback>(tile, args, p, [&](const uint8_t* payload, size_t i) {
    const auto* words = reinterpret_cast<const uint32_t*>(payload + codes_offset(args));
    return decode_row(words[i / 32] >> i % 32, reinterpret_cast<const float*>(payload)[i / kBlock]);
  });

  float mean = 0.0f;
#pragma unroll
  for (int row = 0; row < kRows; row++) {
    const size_t i = tile.index(row);
    if (row % kBlockRows == 0) {
      const float sum = sum_magnitudes<kBlock>(p, row);
      const size_t begin = i / kBlock * kBlock;
      const size_t left = begin < args.numel ? args.numel - begin : 1;
      mean = mean_scale(sum, left < kBlock ? left : kBlock);
    }
    if (i % kBlock == 0 && i < args.numel) args.scales[i / kBlock] = mean;

    uint32_t chunk = 0;
    if (used(mean)) {
      for (int k = 0; k < cuda::kVector; k++) chunk |= quantize(p[row].v[k]) << k;
    }
    store_bits(args.codes, i, args.numel, chunk);
    if (kFeedback) {
      cuda::Vector<float> kept{};
      if (!(mean < kHuge)) kept = load_residual(tile, args, row);  // the block travels as NaN
      for (int k = 0; k < cuda::kVector; k++) {
        p[row].v[k] = residual_of(p[row].v[k], dequantize(chunk >> k, mean), kept.v[k]);
      }
    }
  }
  if (kFeedback) store_residual(tile, args, p);
}

template <bool kAdd>
__global__ void __launch_bounds__(cuda::kThreads) decode_kernel(const Batch<DecodeParams> batch) {
  const DecodeParams args = tensor_of_block(batch);
  decode_tile<kAdd, uint32_t>(
      args,
      [&](size_t i) {
        return Scaled<uint32_t>{reinterpret_cast<const uint32_t*>(args.codes)[i / 32] >> i % 32,
                                args.scales[i >> args.block_bits]};
      },
      [](const Scaled<uint32_t>& row) { return decode_row(row.codes, row.scale); });
}

}  // namespace pycomm::codecs::sign

namespace pycomm::codecs {

#define ENCODE(block) \
  PYCOMM_KERNEL(sign::encode_kernel<block, false>), PYCOMM_KERNEL(sign::encode_kernel<block, true>)
PYCOMM_KERNELS(sign, ENCODE(32), ENCODE(64), ENCODE(128), ENCODE(256), ENCODE(512), ENCODE(1024),
               ENCODE(2048), PYCOMM_KERNEL(sign::decode_kernel<false>),
               PYCOMM_KERNEL(sign::decode_kernel<true>));
#undef ENCODE

}  // namespace pycomm::codecs
