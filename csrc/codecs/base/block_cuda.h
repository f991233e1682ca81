// CUDA kernels of the codecs with blocks. The codec provides a Coder, which turns four values into
// their codes and back; the arithmetic is in block.h and in the header of the codec. Compiled by
// nvcc and NVRTC.
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

/// Computes the largest magnitude of each lane's values of a row.
template <int kRows>
__device__ __forceinline__ void max_of_rows(const cuda::Vector<float> (&p)[kRows],
                                            uint32_t (&top)[kRows]) {
#pragma unroll
  for (int row = 0; row < kRows; row++) {
    top[row] = 0;
    for (int k = 0; k < cuda::kVector; k++) top[row] = max(top[row], magnitude_bits(p[row].v[k]));
  }
}

// ---------------------------------------------------------------- kernels

template <typename Coder, int kRows, bool kFeedback>
__global__ void __launch_bounds__(cuda::kThreads) encode_blocks(const Batch<EncodeParams> batch) {
  const EncodeParams args = tensor_of_block(batch);
  const cuda::Tile<kRows> tile = tile_of<kRows>(args);
  if (tile.empty()) return;
  const uint32_t block = 1u << args.block_bits;

  cuda::Vector<float> p[kRows];
  load_values<kFeedback>(tile, args, p, [&](const uint8_t* payload, size_t i) {
    const auto* codes =
        reinterpret_cast<const typename Coder::Codes*>(payload + codes_offset(args));
    return Coder::decode(codes[i / 4],
                         reinterpret_cast<const float*>(payload)[i >> args.block_bits]);
  });

  uint32_t top[kRows];
  max_of_rows(p, top);
  max_of_blocks(top, block);

#pragma unroll
  for (int row = 0; row < kRows; row++) {
    const size_t i = tile.index(row);
    const float amax = bits_float(top[row]);
    const float s = scale(amax, Coder::kTop);
    if (i % block == 0 && i < args.numel) args.scales[i >> args.block_bits] = s;

    Encoded<typename Coder::Codes> encoded{};
    if (used(amax)) encoded = Coder::encode(p[row], inv_scale(amax, Coder::kTop), args, i / 4);
    // Codes are padded with zeros to a multiple of four bytes.
    constexpr size_t kWord = 32 / Coder::kBits;
    if (i / kWord * kWord < args.numel) {
      reinterpret_cast<typename Coder::Codes*>(args.codes)[i / 4] = encoded.codes;
    }

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
  const DecodeParams args = tensor_of_block(batch);
  const cuda::Tile<kSmall> tile(block_of(args), args.numel, args.out);
  if (tile.empty()) return;

  typename Coder::Codes codes[kSmall];
  float s[kSmall];
#pragma unroll
  for (int row = 0; row < kSmall; row++) {
    const size_t i = tile.index(row);
    const bool there = i < args.numel;
    codes[row] = there ? reinterpret_cast<const typename Coder::Codes*>(args.codes)[i / 4] : 0;
    s[row] = there ? args.scales[i >> args.block_bits] : 0.0f;
  }
  cuda::Vector<float> value[kSmall];
  if (kAdd) tile.load(args.out, value);
#pragma unroll
  for (int row = 0; row < kSmall; row++) {
    const cuda::Vector<float> decoded = Coder::decode(codes[row], s[row]);
    for (int k = 0; k < cuda::kVector; k++) {
      value[row].v[k] = kAdd ? value[row].v[k] + decoded.v[k] : decoded.v[k];
    }
  }
  tile.store(args.out, args.numel, value);
}

}  // namespace pycomm::codecs
