// mx in CUDA. Wire format: docs/wire/mx.md. The arithmetic is in mx.h. Compiled by nvcc, or at run
// time by NVRTC, which takes the kernels only.
#include "codecs/base/bits_cuda.h"
#include "codecs/base/block_cuda.h"
#include "codecs/base/kernels_cuda.h"
#include "codecs/mx.h"

namespace pycomm::codecs::mx {

// ---------------------------------------------------------------- kernels

/// Scales of a block: `code` travels.
struct BlockScale {
  uint32_t code;
  float unit;
  float inv;
};

template <typename Small>
__device__ __forceinline__ BlockScale mx_scale(uint32_t amax, bool ceil) {
  const uint32_t code = scale_code<Small>(amax, ceil);
  return {code, decode_scale(code), inv_scale(code)};
}

__device__ __forceinline__ BlockScale nv_block_scale(uint32_t amax, float super_amax,
                                                     const Scale& second) {
  Rounded first{0, 0.0f};
  if (second.used) first = nv_scale(bits_float(amax), super_amax);
  const float unit = first.value * second.unit;
  return {first.code, unit, unit > 0.0f ? 1.0f / unit : 0.0f};
}

/// Returns the unit of the codes of value i, from the scales at the start of a payload.
template <bool kNv>
__device__ __forceinline__ float unit_of(const float* scales, size_t i, size_t numel) {
  const size_t at = kNv ? num_blocks(numel, kSuperBlock) * sizeof(float) : 0;
  const uint32_t code =
      reinterpret_cast<const uint8_t*>(scales)[at + i / (kNv ? kNvBlock : kBlock)];
  return kNv ? Float8E4M3::decode(code) * scales[i / kSuperBlock] : decode_scale(code);
}

/// Decodes four codes.
template <typename Small>
__device__ __forceinline__ cuda::Vector<float> decode_row(uint32_t chunk, float unit) {
  cuda::Vector<float> value;
  for (int k = 0; k < cuda::kVector; k++) {
    const uint32_t code = (chunk >> (k * Small::kBits)) & ((1u << Small::kBits) - 1);
    value.v[k] = Small::decode(code) * unit;
  }
  return value;
}

/// Encodes values. args.options is 1 if scales are rounded up. A super-block of nvfp4 is the tiles
/// of four warps.
template <typename Small, bool kNv, bool kFeedback>
__global__ void __launch_bounds__(cuda::kThreads) encode_kernel(const Batch<EncodeParams> batch) {
  const EncodeParams args = tensor_of_block(batch);
  constexpr int kRows = kSmall;
  constexpr uint32_t kSize = kNv ? kNvBlock : kBlock;
  const cuda::Tile<kRows> tile = tile_of<kRows>(args);
  if (!kNv && tile.empty()) return;
  const size_t scales_at = kNv ? num_blocks(args.numel, kSuperBlock) * 4 : 0;
  auto* scale_codes = reinterpret_cast<uint8_t*>(args.scales) + scales_at;

  cuda::Vector<float> p[kRows];
  load_values<kFeedback>(tile, args, p, [&](const uint8_t* payload, size_t i) {
    return decode_row<Small>(load_codes(payload + codes_offset(args), i, args.numel, Small::kBits),
                             unit_of<kNv>(reinterpret_cast<const float*>(payload), i, args.numel));
  });

  uint32_t top[kRows];
  max_of_rows(p, top);
  max_of_blocks(top, kSize);
  float super_amax = 0.0f;
  Scale second{};
  if constexpr (kNv) {
    __shared__ uint32_t tops[cuda::kWarps];
    constexpr uint32_t kShare = kRows * cuda::kRow, kTogether = kSuperBlock / kShare;
    uint32_t all[1] = {0};
    for (int row = 0; row < kRows; row++) all[0] = max(all[0], top[row]);
    max_of_blocks(all, kShare);
    if (lane_of_warp() == 0) tops[warp_of_block()] = all[0];
    __syncthreads();
    if (tile.empty()) return;
    for (uint32_t warp = 0; warp < kTogether; warp++) {
      all[0] = max(all[0], tops[warp_of_block() / kTogether * kTogether + warp]);
    }
    super_amax = bits_float(all[0]);
    second = super_scale(super_amax);
    const size_t i = tile.index(0);
    if (i % kSuperBlock == 0) args.scales[i / kSuperBlock] = second.unit;
  }

#pragma unroll
  for (int row = 0; row < kRows; row++) {
    const size_t i = tile.index(row);
    BlockScale scale;
    if constexpr (kNv) {
      scale = nv_block_scale(top[row], super_amax, second);
    } else {
      scale = mx_scale<Small>(top[row], args.options != 0);
    }
    // Scales end at a multiple of four bytes, in zeros, which are the scales of blocks of zeros.
    if (i % kSize == 0 && i / kSize < padded(num_blocks(args.numel, kSize))) {
      scale_codes[i / kSize] = static_cast<uint8_t>(i < args.numel ? scale.code : 0);
    }

    cuda::Vector<float> value{};
    uint32_t chunk = 0;
    for (int k = 0; k < cuda::kVector && scale.inv != 0.0f; k++) {
      const Rounded rounded = round_nearest<Small>(p[row].v[k] * scale.inv);
      chunk |= rounded.code << (k * Small::kBits);
      value.v[k] = rounded.value * scale.unit;
    }
    store_codes(args.codes, i, args.numel, Small::kBits, chunk);

    if (kFeedback) {
      const bool lost = !(scale.unit < kHuge);  // the block travels as NaN
      cuda::Vector<float> kept{};
      if (lost) kept = load_residual(tile, args, row);
      for (int k = 0; k < cuda::kVector; k++) {
        p[row].v[k] = lost ? kept.v[k] : p[row].v[k] - value.v[k];
      }
    }
  }
  if (kFeedback) store_residual(tile, args, p);
}

template <typename Small, bool kNv, bool kAdd>
__global__ void __launch_bounds__(cuda::kThreads) decode_kernel(const Batch<DecodeParams> batch) {
  const DecodeParams args = tensor_of_block(batch);
  decode_tile<kAdd, uint32_t>(
      args,
      [&](size_t i) {
        return Scaled<uint32_t>{load_codes(args.codes, i, args.numel, Small::kBits),
                                unit_of<kNv>(args.scales, i, args.numel)};
      },
      [](const Scaled<uint32_t>& row) { return decode_row<Small>(row.codes, row.scale); });
}

}  // namespace pycomm::codecs::mx

namespace pycomm::codecs {

#define MX(Small, nv)                                             \
  PYCOMM_KERNEL(mx::encode_kernel<pycomm::Small, nv, false>),     \
      PYCOMM_KERNEL(mx::encode_kernel<pycomm::Small, nv, true>),  \
      PYCOMM_KERNEL(mx::decode_kernel<pycomm::Small, nv, false>), \
      PYCOMM_KERNEL(mx::decode_kernel<pycomm::Small, nv, true>)
PYCOMM_KERNELS(mx, MX(Float8E4M3, false), MX(Float8E5M2, false), MX(Float6E2M3, false),
               MX(Float6E3M2, false), MX(Float4E2M1, false), MX(Float4E2M1, true));
#undef MX

}  // namespace pycomm::codecs
