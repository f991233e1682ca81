// CUDA kernels of quant for every width, which is an argument at run time; 8 and 4 bits have
// kernels of their own (quant.cu). Compiled by nvcc and NVRTC.
#pragma once
#include "codecs/base/bits_cuda.h"
#include "codecs/base/block_cuda.h"
#include "codecs/quant.h"

namespace pycomm::codecs::quant {

/// Encodes the four values from value i on: their codes, and what the codes represent.
template <bool kRandom>
__device__ __forceinline__ Encoded<uint32_t> encode_row(int bits, const Scale& s,
                                                        const cuda::Vector<float>& p,
                                                        const EncodeParams& args, size_t i,
                                                        size_t numel) {
  Random4 random{};
  if (kRandom) random = random_words(args.seed, args.step, args.tensor, args.group + i / 4);
  Encoded<uint32_t> out{};
  for (int k = 0; k < cuda::kVector; k++) {
    int q = 0;
    if (s.used && i + k < numel) {
      const float v = p.v[k] * s.inv;
      q = kRandom ? round_randomly(v, random.word[k], top(bits)) : round_nearest(v);
    }
    out.value.v[k] = dequantize(q, s.unit);
    out.codes |= (static_cast<uint32_t>(q) & ((1u << bits) - 1)) << (k * bits);
  }
  return out;
}

/// Decodes the four values of a chunk of codes.
__device__ __forceinline__ cuda::Vector<float> decode_row(int bits, float unit, uint32_t chunk) {
  const int sign = 1 << (bits - 1);
  cuda::Vector<float> value;
  for (int k = 0; k < cuda::kVector; k++) {
    const uint32_t code = (chunk >> (k * bits)) & ((1u << bits) - 1);
    value.v[k] = dequantize(static_cast<int>(code ^ sign) - sign, unit);
  }
  return value;
}

// ---------------------------------------------------------------- kernels

// Blocks per multiprocessor, as in eden.cu: a warp with the values and residuals of 16 rows has
// no registers for a second block.
template <int kRows, bool kFeedback>
constexpr int kEncodeBlocks = kRows > kSmall&& kFeedback ? 1 : 2;

template <int kRows, bool kRandom, bool kFeedback>
__global__ void __launch_bounds__(cuda::kThreads, kEncodeBlocks<kRows, kFeedback>)
    encode_wide(const Batch<EncodeParams> batch) {
  const EncodeParams args = tensor_of_block(batch);
  const cuda::Tile<kRows> tile = tile_of<kRows>(args);
  if (tile.empty()) return;
  const int bits = static_cast<int>(args.options);
  const uint32_t block = 1u << args.block_bits;

  cuda::Vector<float> p[kRows];
  load_values<kFeedback>(tile, args, p, [&](const uint8_t* payload, size_t i) {
    return decode_row(bits, reinterpret_cast<const float*>(payload)[i >> args.block_bits],
                      load_codes(payload + codes_offset(args), i, args.numel, bits));
  });

  uint32_t amax[kRows];
  max_of_rows(p, amax);
  max_of_blocks(amax, block);

#pragma unroll
  for (int row = 0; row < kRows; row++) {
    const size_t i = tile.index(row);
    const Scale s = symmetric_scale(bits_float(amax[row]), static_cast<float>(top(bits)));
    if (i % block == 0 && i < args.numel) args.scales[i >> args.block_bits] = s.unit;

    const Encoded<uint32_t> encoded = encode_row<kRandom>(bits, s, p[row], args, i, args.numel);
    store_codes(args.codes, i, args.numel, bits, encoded.codes);

    if (kFeedback) {
      cuda::Vector<float> kept{};
      if (!(s.unit < kHuge)) kept = load_residual(tile, args, row);  // the block travels as NaN
      for (int k = 0; k < cuda::kVector; k++) {
        p[row].v[k] = residual_of(p[row].v[k], encoded.value.v[k], kept.v[k]);
      }
    }
  }
  if (kFeedback) store_residual(tile, args, p);
}

template <bool kAdd>
__global__ void __launch_bounds__(cuda::kThreads) decode_wide(const Batch<DecodeParams> batch) {
  const DecodeParams args = tensor_of_block(batch);
  const int bits = static_cast<int>(args.options);
  decode_tile<kAdd, uint32_t>(
      args,
      [&](size_t i) {
        return Scaled<uint32_t>{load_codes(args.codes, i, args.numel, bits),
                                args.scales[i >> args.block_bits]};
      },
      [&](const Scaled<uint32_t>& row) { return decode_row(bits, row.scale, row.codes); });
}

}  // namespace pycomm::codecs::quant
