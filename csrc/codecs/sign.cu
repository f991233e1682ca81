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

/// Replaces the sum of each row's block by its scale. A product by the inverse of a power of two
/// rounds as the division does.
template <int kBlock, int kRows>
__device__ __forceinline__ void each_mean(const cuda::Tile<kRows>& tile, size_t numel,
                                          uint32_t (&sum)[kRows]) {
  if (tile.whole()) {
#pragma unroll
    for (int row = 0; row < kRows; row++) {
      sum[row] = float_bits(scale(bits_float(sum[row]) * (1.0f / kBlock), 1.0f));
    }
    return;
  }
#pragma unroll
  for (int row = 0; row < kRows; row++) {
    const size_t begin = tile.index(row) / kBlock * kBlock;
    const size_t left = begin < numel ? numel - begin : 1;
    sum[row] = float_bits(mean_scale(bits_float(sum[row]), left < kBlock ? left : kBlock));
  }
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
  constexpr uint32_t kBlockBits = bits_below(kBlock);
  const cuda::Tile<kRows> tile = tile_of<kRows>(args);
  if (tile.empty()) return;

  cuda::Vector<float> p[kRows];
  load_values<kFeedback>(tile, args, p, [&](const uint8_t* payload, int row) {
    const uint32_t bits = load_bits(payload + codes_offset(args), tile, row);
    return decode_row(bits, scale_of(payload, tile, row, kBlockBits));
  });

  uint32_t mean[kRows];
#pragma unroll
  for (int row = 0; row < kRows; row++) {
    const bool again = row % kBlockRows != 0;
    mean[row] = again ? mean[row - 1] : float_bits(sum_magnitudes<kBlock>(p, row));
  }
  each_mean<kBlock>(tile, args.numel, mean);
  const int left = tile.left_of(args.numel);
  float* const scales = args.scales + tile.first_block(kBlockBits);
  uint32_t bits[kRows];
#pragma unroll
  for (int row = 0; row < kRows; row++) {
    const float unit = bits_float(mean[row]);
    if (tile.index(row) % kBlock == 0 && row * cuda::kRow < left) {
      scales[tile.next_block(row, kBlockBits)] = unit;
    }
    uint32_t chunk = 0;
    for (int k = 0; k < cuda::kVector; k++) chunk |= quantize(p[row].v[k]) << k;
    bits[row] = used(unit) ? chunk : 0;
    for (int k = 0; kFeedback && k < cuda::kVector; k++) {
      p[row].v[k] = p[row].v[k] - dequantize(bits[row] >> k, unit);
    }
  }
  store_bits(args.codes, tile, args.numel, bits);
  if (kFeedback) {
    Lost<kRows>(mean).keep(tile, args, mean, p);
    store_residual(tile, args, p);
  }
}

template <bool kAdd>
__global__ void __launch_bounds__(cuda::kThreads) decode_kernel(const Batch<DecodeParams> batch) {
  const DecodeParams args = tensor_of_block(batch);
  decode_tile<kAdd, uint32_t>(
      args,
      [&](const auto& tile, int row) {
        return Scaled<uint32_t>{load_bits(args.codes, tile, row),
                                scale_of(args.scales, tile, row, args.block_bits)};
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
