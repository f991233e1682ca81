// eden in CUDA. Wire format: docs/wire/eden.md. The arithmetic is in eden.h, rotations in
// rotation_cuda.h. Compiled by nvcc, or at run time by NVRTC, which takes the kernels only.
#include "codecs/base/bits_cuda.h"
#include "codecs/base/kernels_cuda.h"
#include "codecs/eden.h"
#include "codecs/rotation/cuda.h"

namespace pycomm::codecs::eden {

/// Joins four codes, a byte each, to four of `bits` bits.
__device__ __forceinline__ uint32_t joined(uint32_t codes, int bits) {
  uint32_t chunk = 0;
  for (int k = 0; k < cuda::kVector; k++) chunk |= (codes >> (8 * k) & 255) << (k * bits);
  return chunk;
}

template <int kBits>
__device__ __forceinline__ void store_row(uint8_t* codes, size_t i, size_t numel, uint32_t chunk) {
  if constexpr (kBits == 1) {
    store_bits(codes, i, numel, chunk);
  } else {
    store_codes(codes, i, numel, kBits, chunk);
  }
}

// ---------------------------------------------------------------- kernels

// Blocks that a multiprocessor runs at once, since one waits for memory while another computes.
// Some encoders spill registers for it, up to 128 bytes of a thread, and are still faster: by a
// sixth to a third on an H200.
constexpr int kBlocksAtOnce = 2;

template <int kBits>
__global__ void __launch_bounds__(cuda::kThreads, kBlocksAtOnce)
    encode_kernel(const Batch<EncodeParams> batch) {
  const EncodeParams args = tensor_of_block(batch);
  const uint32_t size = 1u << args.rotation_bits;
  const Tile tile = tile_of<kTileRows>(args);
  if (tile.empty() && size <= kTile) return;
  const RotationHeader header = write_header(args);
  const RotationSigns signs(header, first_of(tile));

  Values y;
  encode_rotated(tile, args, signs, y, [&] {
    uint32_t top[kTileRows];
#pragma unroll
    for (int row = 0; row < kTileRows; row++) {
      top[row] = 0;
      for (int k = 0; k < cuda::kVector; k++) top[row] = max(top[row], magnitude_bits(y[row].v[k]));
    }
    max_of_tile(top, size);

    Values terms;
    float energy[kTileRows], sum[kTileRows];
#pragma unroll
    for (int row = 0; row < kTileRows; row++) {
      const float shrink = inverse_exponent(exponent_of(bits_float(top[row])));
      for (int k = 0; k < cuda::kVector; k++) {
        y[row].v[k] = y[row].v[k] * shrink;
        terms[row].v[k] = y[row].v[k] * y[row].v[k];
      }
    }
    add_halves(terms, size, energy);

    uint32_t codes[kTileRows];
#pragma unroll
    for (int row = 0; row < kTileRows; row++) {
      const float inv = sqrtf(static_cast<float>(size) / energy[row]);
      codes[row] = 0;
      for (int k = 0; k < cuda::kVector; k++) {
        const Coded coded = quantize<kBits>(y[row].v[k], inv);
        codes[row] |= coded.code << (8 * k);
        terms[row].v[k] = coded.value * y[row].v[k];
      }
      if (!used(bits_float(top[row]))) codes[row] = 0;
    }
    add_halves(terms, size, sum);
    if (args.options & kMmse) {
#pragma unroll
      for (int row = 0; row < kTileRows; row++) {
        energy[row] = sum[row];
        for (int k = 0; k < cuda::kVector; k++) {
          const float value = dequantize<kBits>(codes[row] >> (8 * k));
          terms[row].v[k] = value * value;
        }
      }
      add_halves(terms, size, sum);
    }

    float scale[kTileRows];
#pragma unroll
    for (int row = 0; row < kTileRows; row++) {
      const size_t i = tile.index(row);
      const float amax = bits_float(top[row]);
      scale[row] =
          used(amax) ? energy[row] / sum[row] * exponent_of(amax) : codecs::scale(amax, 1.0f);
      if (i % size == 0 && i < args.numel) args.scales[i >> args.rotation_bits] = scale[row];
    }
    const size_t rotated = rotated_values(args.numel, args.rotation_bits);
#pragma unroll
    for (int row = 0; row < kTileRows; row++) {
      store_row<kBits>(args.codes, tile.index(row), rotated, joined(codes[row], kBits));
    }

    if (args.residual == nullptr) return;
#pragma unroll
    for (int row = 0; row < kTileRows; row++) {
      for (int k = 0; k < cuda::kVector; k++) {
        y[row].v[k] = dequantize<kBits>(codes[row] >> (8 * k)) * scale[row];
      }
    }
  });
}

template <int kBits>
__global__ void __launch_bounds__(cuda::kThreads, kBlocksAtOnce)
    decode_kernel(const Batch<DecodeParams> batch) {
  const DecodeParams args = tensor_of_block(batch);
  const uint32_t size = 1u << args.rotation_bits;
  const Tile tile(block_of(args), args.numel, args.out);
  if (tile.empty() && size <= kTile) return;
  const RotationHeader header = read_header(args);
  const RotationSigns signs(header, first_of(tile));

  Values y;
  const size_t rotated = rotated_values(args.numel, args.rotation_bits);
#pragma unroll
  for (int row = 0; row < kTileRows; row++) {
    const size_t i = tile.index(row);
    const bool there = i < rotated;
    const uint32_t chunk = there ? load_codes(args.codes, i, rotated, kBits) : 0;
    const float s = there ? args.scales[i >> args.rotation_bits] : 0.0f;
    for (int k = 0; k < cuda::kVector; k++) {
      y[row].v[k] = dequantize<kBits>(chunk >> (k * kBits)) * s;
    }
  }
  store_unrotated(tile, args, signs, y);
}

}  // namespace pycomm::codecs::eden

namespace pycomm::codecs {

#define EDEN(bits) \
  PYCOMM_KERNEL(eden::encode_kernel<bits>), PYCOMM_KERNEL(eden::decode_kernel<bits>)
PYCOMM_KERNELS(eden, EDEN(1), EDEN(2), EDEN(3), EDEN(4));
#undef EDEN

}  // namespace pycomm::codecs
