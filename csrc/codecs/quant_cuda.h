// CUDA kernels of quant for every width, range and type of scale, which are arguments at run time;
// 8 and 4 bits around zero with float32 scales have kernels of their own (quant.cu). Compiled by
// nvcc and NVRTC.
#pragma once
#include "codecs/base/bits_cuda.h"
#include "codecs/base/block_cuda.h"
#include "codecs/quant.h"

namespace pycomm::codecs::quant {

__device__ __forceinline__ Format format_of(uint32_t options) {
  Format f;
  f.bits = static_cast<int>(options & 255);
  f.minmax = (options & kMinMax) != 0;
  f.bfloat16 = (options & kBFloat16) != 0;
  return f;
}

/// Stores the scale of a block. `last`: it is the last one, after which the section may need
/// padding.
__device__ __forceinline__ void store_scale(const Format& f, float* scales, size_t block, bool last,
                                            Scale s) {
  if (f.bfloat16) {
    auto* to = reinterpret_cast<uint16_t*>(scales) + block * (f.minmax ? 2 : 1);
    to[0] = static_cast<uint16_t>(float_bits(s.unit) >> 16);
    if (f.minmax) {
      to[1] = static_cast<uint16_t>(float_bits(s.low) >> 16);
    } else if (last && block % 2 == 0) {
      to[1] = 0;
    }
  } else {
    float* to = scales + block * (f.minmax ? 2 : 1);
    to[0] = s.unit;
    if (f.minmax) to[1] = s.low;
  }
}

__device__ __forceinline__ Scale load_scale(const Format& f, const float* scales, size_t block) {
  Scale s{};
  if (f.bfloat16) {
    const auto* from = reinterpret_cast<const uint16_t*>(scales) + block * (f.minmax ? 2 : 1);
    s.unit = bits_float(uint32_t{from[0]} << 16);
    if (f.minmax) s.low = bits_float(uint32_t{from[1]} << 16);
  } else {
    const float* from = scales + block * (f.minmax ? 2 : 1);
    s.unit = from[0];
    if (f.minmax) s.low = from[1];
  }
  return s;
}

/// Computes the largest value of a row, and the largest complement of a value, in the unsigned
/// order of to_order(); 0 is below every value, so values beyond the end do not count.
__device__ __forceinline__ void extremes(const cuda::Vector<float>& p, size_t i, size_t numel,
                                         uint32_t& high, uint32_t& low) {
  high = low = 0;
  for (int k = 0; k < cuda::kVector; k++) {
    if (i + k >= numel) continue;
    const uint32_t order = static_cast<uint32_t>(to_order(p.v[k])) ^ 0x80000000u;
    high = max(high, order);
    low = max(low, ~order);
  }
}

/// Returns the scale of a block with these extremes.
__device__ __forceinline__ Scale scale_of(const Format& f, uint32_t high, uint32_t low) {
  const float most = from_order(static_cast<int32_t>(high ^ 0x80000000u));
  const float least = from_order(static_cast<int32_t>(~low ^ 0x80000000u));
  const uint32_t amax = max(magnitude_bits(most), magnitude_bits(least));
  return f.minmax ? minmax_scale(f, least, most) : symmetric_scale(f, bits_float(amax));
}

/// Encodes the four values from value i on: their codes, and what the codes represent.
template <bool kRandom>
__device__ __forceinline__ Encoded<uint32_t> encode_row(const Format& f, const Scale& s,
                                                        const cuda::Vector<float>& p,
                                                        const EncodeParams& args, size_t i,
                                                        size_t numel) {
  Random4 random{};
  if (kRandom) random = random_words(args.seed, args.step, args.tensor, args.group + i / 4);
  Encoded<uint32_t> out{};
  for (int k = 0; k < cuda::kVector; k++) {
    int q = 0;
    if (s.used && i + k < numel) {
      const float v = (f.minmax ? p.v[k] - s.low : p.v[k]) * s.inv;
      q = kRandom ? round_randomly(v, random.word[k] + args.shift, top(f)) : round_nearest(v);
    }
    out.value.v[k] = f.minmax ? dequantize(q, s.unit, s.low) : dequantize(q, s.unit);
    out.codes |= (static_cast<uint32_t>(q) & ((1u << f.bits) - 1)) << (k * f.bits);
  }
  return out;
}

/// Decodes the four values of a chunk of codes.
__device__ __forceinline__ cuda::Vector<float> decode_row(const Format& f, const Scale& s,
                                                          uint32_t chunk) {
  const int sign = f.minmax ? 0 : 1 << (f.bits - 1);
  cuda::Vector<float> value;
  for (int k = 0; k < cuda::kVector; k++) {
    const uint32_t code = (chunk >> (k * f.bits)) & ((1u << f.bits) - 1);
    const int q = static_cast<int>(code ^ sign) - sign;
    value.v[k] = f.minmax ? dequantize(q, s.unit, s.low) : dequantize(q, s.unit);
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
  const Format f = format_of(args.options);
  const uint32_t block = 1u << args.block_bits;

  cuda::Vector<float> p[kRows];
  load_values<kFeedback>(tile, args, p, [&](const uint8_t* payload, size_t i) {
    const auto* scales = reinterpret_cast<const float*>(payload);
    return decode_row(f, load_scale(f, scales, i >> args.block_bits),
                      load_codes(payload + codes_offset(args), i, args.numel, f.bits));
  });

  uint32_t high[kRows], low[kRows];
#pragma unroll
  for (int row = 0; row < kRows; row++) {
    extremes(p[row], tile.index(row), args.numel, high[row], low[row]);
  }
  max_of_blocks(high, block);
  max_of_blocks(low, block);

#pragma unroll
  for (int row = 0; row < kRows; row++) {
    const size_t i = tile.index(row);
    const Scale s = scale_of(f, high[row], low[row]);
    if (i % block == 0 && i < args.numel) {
      store_scale(f, args.scales, i >> args.block_bits, args.numel - i <= block, s);
    }

    const Encoded<uint32_t> encoded = encode_row<kRandom>(f, s, p[row], args, i, args.numel);
    store_codes(args.codes, i, args.numel, f.bits, encoded.codes);

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
  const cuda::Tile<kSmall> tile(block_of(args), args.numel, args.out);
  if (tile.empty()) return;
  const Format f = format_of(args.options);

  uint32_t chunk[kSmall];
  Scale s[kSmall];
#pragma unroll
  for (int row = 0; row < kSmall; row++) {
    const size_t i = tile.index(row);
    const bool there = i < args.numel;
    chunk[row] = there ? load_codes(args.codes, i, args.numel, f.bits) : 0;
    s[row] = there ? load_scale(f, args.scales, i >> args.block_bits) : Scale{};
  }
  cuda::Vector<float> out[kSmall];
  if (kAdd) tile.load(args.out, out);
#pragma unroll
  for (int row = 0; row < kSmall; row++) {
    const cuda::Vector<float> value = decode_row(f, s[row], chunk[row]);
    for (int k = 0; k < cuda::kVector; k++) {
      out[row].v[k] = kAdd ? out[row].v[k] + value.v[k] : value.v[k];
    }
  }
  tile.store(args.out, args.numel, out);
}

}  // namespace pycomm::codecs::quant
