// CUDA kernels of the codecs with blocks. The codec provides a Coder, which turns four values into
// their codes and back, and loads and stores them; the arithmetic is in block.h and in the header
// of the codec. Compiled by nvcc and NVRTC.
#pragma once
#include "codecs/base/block.h"
#include "codecs/base/params.h"
#include "codecs/base/residual_cuda.h"
#include "codecs/base/warp_cuda.h"
#include "core/types.h"

namespace pycomm::codecs {

/// Codes of four values, and the values that they represent before the scale.
template <typename Codes>
struct Encoded {
  Codes codes;
  cuda::Vector<float> value;
};

/// How coders whose four codes are one element of the payload load and store it.
template <typename Element, int kBits>
struct WholeCodes {
  using Codes = Element;
  template <typename Params>
  __device__ static Codes load(const Params&, const uint8_t* codes, size_t i) {
    return reinterpret_cast<const Codes*>(codes)[i / 4];
  }
  /// Codes are padded with zeros to a multiple of four bytes.
  __device__ static void store(const EncodeParams& args, size_t i, Codes codes) {
    constexpr size_t kWord = 32 / kBits;
    if (i / kWord * kWord < args.numel) reinterpret_cast<Codes*>(args.codes)[i / 4] = codes;
  }
};

/// Reduces the maximum of each lane's values of a row to the maximum of their block.
template <int kRows>
__device__ void max_of_blocks(uint32_t (&top)[kRows], uint32_t block) {
#pragma unroll
  for (int step = 1; step < kRows; step *= 2) {
    if (step * cuda::kRow < block) {
#pragma unroll
      for (int row = 0; row < kRows; row++) {
        if ((row & step) == 0) top[row] = top[row + step] = max(top[row], top[row + step]);
      }
    }
  }
#pragma unroll
  for (int lane = 1; lane < cuda::kLanes; lane *= 2) {
    if (lane * cuda::kVector < block) {
#pragma unroll
      for (int row = 0; row < kRows; row++) {
        top[row] = max(top[row], __shfl_xor_sync(~0u, top[row], lane));
      }
    }
  }
}

/// Loads the input of a tile (load_input), and adds the residuals if there is feedback.
template <bool kFeedback, int kRows, typename Decode>
__device__ __forceinline__ void load_values(const cuda::Tile<kRows>& tile, const EncodeParams& args,
                                            cuda::Vector<float> (&p)[kRows], const Decode& decode) {
  load_input(tile, args, p, decode);
  if (!kFeedback) return;
#pragma unroll
  for (int row = 0; row < kRows; row++) {
    const cuda::Vector<float> residual = load_residual(tile, args, row);
    for (int k = 0; k < cuda::kVector; k++) p[row].v[k] = p[row].v[k] + residual.v[k];
  }
}

/// Returns where the codes begin in a payload of the same size as the one that is written.
__device__ __forceinline__ size_t codes_offset(const EncodeParams& args) {
  return args.codes - reinterpret_cast<const uint8_t*>(args.scales);
}

/// Returns the larger of two magnitudes; a NaN is larger than all.
__device__ __forceinline__ float larger(float a, float b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
#else
  return bits_float(max(float_bits(a), float_bits(b)));
#endif
}

/// Computes the largest magnitude of each lane's values of a row, by instructions that take
/// magnitudes themselves: integers would need one more for each.
template <int kRows>
__device__ __forceinline__ void max_of_rows(const cuda::Vector<float> (&p)[kRows],
                                            uint32_t (&top)[kRows]) {
#pragma unroll
  for (int row = 0; row < kRows; row++) {
    float largest = fabsf(p[row].v[0]);
    for (int k = 1; k < cuda::kVector; k++) largest = larger(largest, fabsf(p[row].v[k]));
    top[row] = float_bits(largest);
  }
}

/// Codes of four values with the scale of their block.
template <typename Codes>
struct Scaled {
  Codes codes;
  float scale;
};

/// Decodes a tile of a payload: load(i) returns the codes from value i on, Scaled, and decode()
/// makes the four values of them. All is loaded before the first is decoded.
template <bool kAdd, typename Codes, typename Load, typename Decode>
__device__ __forceinline__ void decode_tile(const DecodeParams& args, const Load& load,
                                            const Decode& decode) {
  const cuda::Tile<kSmall> tile(block_of(args), args.numel, args.out);
  if (tile.empty()) return;
  Scaled<Codes> row_codes[kSmall];
#pragma unroll
  for (int row = 0; row < kSmall; row++) {
    const size_t i = tile.index(row);
    row_codes[row] = Scaled<Codes>{0, 0.0f};
    if (i < args.numel) row_codes[row] = load(i);
  }
  cuda::Vector<float> out[kSmall];
  if (kAdd) tile.load(args.out, out);
#pragma unroll
  for (int row = 0; row < kSmall; row++) {
    const cuda::Vector<float> value = decode(row_codes[row]);
    for (int k = 0; k < cuda::kVector; k++) {
      out[row].v[k] = kAdd ? out[row].v[k] + value.v[k] : value.v[k];
    }
  }
  tile.store(args.out, args.numel, out);
}

// ---------------------------------------------------------------- kernels

template <typename Coder, int kRows, bool kFeedback>
__global__ void __launch_bounds__(cuda::kThreads, kRows > kSmall ? 1
                                                  : kFeedback    ? 3
                                                                 : 4)
    encode_blocks(const Batch<EncodeParams> batch) {
  const EncodeParams args = tensor_of_block(batch);
  const cuda::Tile<kRows> tile = tile_of<kRows>(args);
  if (tile.empty()) return;
  const uint32_t block = 1u << args.block_bits;

  cuda::Vector<float> p[kRows];
  load_values<kFeedback>(tile, args, p, [&](const uint8_t* payload, size_t i) {
    return Coder::decode(args, Coder::load(args, payload + codes_offset(args), i),
                         reinterpret_cast<const float*>(payload)[i >> args.block_bits]);
  });

  uint32_t amax_bits[kRows];
  max_of_rows(p, amax_bits);
  max_of_blocks(amax_bits, block);
  const float top = Coder::top(args);

#pragma unroll
  for (int row = 0; row < kRows; row++) {
    const size_t i = tile.index(row);
    const float amax = bits_float(amax_bits[row]);
    const float s = scale(amax, top);
    if (i % block == 0 && i < args.numel) args.scales[i >> args.block_bits] = s;

    Encoded<typename Coder::Codes> encoded{};
    if (used(amax)) encoded = Coder::encode(p[row], inv_scale(amax, top), args, i / 4);
    Coder::store(args, i, encoded.codes);

    if (kFeedback) {
      cuda::Vector<float> kept{};
      if (!(amax < kHuge)) kept = load_residual(tile, args, row);  // the block travels as NaN
      for (int k = 0; k < cuda::kVector; k++) {
        p[row].v[k] = residual_of(p[row].v[k], encoded.value.v[k] * s, kept.v[k]);
      }
    }
  }
  if (kFeedback) store_residual(tile, args, p);
}

template <typename Coder, bool kAdd>
__global__ void __launch_bounds__(cuda::kThreads) decode_blocks(const Batch<DecodeParams> batch) {
  using Codes = typename Coder::Codes;
  const DecodeParams args = tensor_of_block(batch);
  decode_tile<kAdd, Codes>(
      args,
      [&](size_t i) {
        return Scaled<Codes>{Coder::load(args, args.codes, i), args.scales[i >> args.block_bits]};
      },
      [&](const Scaled<Codes>& row) { return Coder::decode(args, row.codes, row.scale); });
}

}  // namespace pycomm::codecs
