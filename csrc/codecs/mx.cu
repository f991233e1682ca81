// mx in CUDA. Wire format: docs/wire/mx.md. The arithmetic is in mx.h. Compiled by nvcc, or at run
// time by NVRTC, which takes the kernels only.
#include "codecs/base/bits_cuda.h"
#include "codecs/base/block_cuda.h"
#include "codecs/base/kernels_cuda.h"
#include "codecs/mx.h"

namespace pycomm::codecs::mx {

// ---------------------------------------------------------------- kernels

/// How four codes of a row are loaded and stored.
template <int kBits>
struct Chunks {
  template <typename Params, typename Tile>
  __device__ static uint32_t load(const Params& args, const uint8_t* codes, const Tile& tile,
                                  int row) {
    return load_codes(codes, tile.index(row), args.numel, kBits);
  }
  template <typename Tile>
  __device__ static void store(const EncodeParams& args, const Tile& tile, int row,
                               uint32_t chunk) {
    store_codes(args.codes, tile.index(row), args.numel, kBits, chunk);
  }
};
template <>
struct Chunks<4> : WholeCodes<uint16_t, 4> {};
template <>
struct Chunks<8> : WholeCodes<uint32_t, 8> {};

/// Returns the unit of a lane's codes of a row, from the scales at the start of a payload.
template <bool kNv, typename Tile>
__device__ __forceinline__ float unit_of(const void* scales, const Tile& tile, int row,
                                         size_t numel) {
  const auto* codes = static_cast<const uint8_t*>(scales);
  if (kNv) codes += num_blocks(numel, kSuperBlock) * sizeof(float);
  constexpr uint32_t kBits = kNv ? kNvBlockBits : kBlockBits;
  // Rows are whole blocks: the scales of all have one address.
  codes += tile.first_block(kBits) + tile.next_block(0, kBits);
  const uint32_t code = codes[row * (cuda::kRow >> kBits)];
  if (!kNv) return decode_scale(code);
  // A tile is a part of one super-block.
  return Float8E4M3::decode_by_product(code) *
         static_cast<const float*>(scales)[tile.first_block(kSuperBlockBits)];
}

/// Decodes four codes.
template <typename Small>
__device__ __forceinline__ cuda::Vector<float> decode_row(uint32_t chunk, float unit) {
  cuda::Vector<float> value;
  if constexpr (Small::kBits == 4) {
    // The bytes of a magnitude in bfloat16 are looked up for all four; then come the signs.
    const uint32_t low = __byte_perm(0xc0800000, 0xc0804000, chunk);
    const uint32_t signs = __byte_perm(chunk << 4, chunk, 0x5140) & 0x80808080;
    const uint32_t high = __byte_perm(0x3f3f3f00, 0x40404040, chunk) | signs;
    const uint32_t pairs[2] = {__byte_perm(low, high, 0x5140), __byte_perm(low, high, 0x7362)};
    for (int k = 0; k < cuda::kVector; k++) {
      const uint32_t pair = pairs[k / 2];
      value.v[k] = bits_float(k % 2 == 0 ? pair << 16 : pair & 0xffff0000) * unit;
    }
  } else {
    for (int k = 0; k < cuda::kVector; k++) {
      const uint32_t code = (chunk >> (k * Small::kBits)) & ((1u << Small::kBits) - 1);
      value.v[k] = Small::decode_by_product(code) * unit;
    }
  }
  return value;
}

/// Rounds a number to the nearest one of a format that has numbers alone, as round_nearest() does.
template <typename Small>
__device__ __forceinline__ float rounded(float v) {
  const float magnitude = fminf(fabsf(v), bits_float(Small::kLargestBits));
  constexpr uint32_t kShifted = static_cast<uint32_t>(Small::kShift) << 23;
  const float anchor = bits_float(
      max((float_bits(magnitude) & kInfBits) + kShifted, Small::kSmallestNormal + kShifted));
  return bits_float(float_bits((magnitude + anchor) - anchor) | (float_bits(v) & ~0x7fffffffu));
}

/// Replaces four values by what round_nearest() makes of them, and returns their codes. Of numbers
/// alone the code comes from a product that makes the value subnormal, as its bits then are those
/// of the code.
template <typename Small>
__device__ __forceinline__ uint32_t round_row(cuda::Vector<float>& value) {
  if constexpr (Small::kTop == Small::kMagnitude + 1) {
    uint32_t small[cuda::kVector], chunk = 0;
    for (int k = 0; k < cuda::kVector; k++) {
      value.v[k] = rounded<Small>(value.v[k]);
      small[k] = float_bits(value.v[k] * bits_float(static_cast<uint32_t>(Small::kBias) << 23));
    }
    if constexpr (Small::kBits == 4) {
      // The upper half has all bits of a code: the sign, and at 6 the magnitude.
      const uint32_t both =
          __byte_perm(small[1], small[3], 0x7632) | __byte_perm(small[0], small[2], 0x7632) >> 4;
      return __byte_perm((both >> 2 & 0x00770077) | (both >> 8 & 0x00880088), 0, 0x4420);
    }
    for (int k = 0; k < cuda::kVector; k++) {
      const uint32_t sign = small[k] >> Small::kSignShift & ~Small::kMagnitude;
      chunk |= ((small[k] >> Small::kShift & Small::kMagnitude) | sign) << (k * Small::kBits);
    }
    return chunk;
  } else {
    uint32_t chunk = 0;
    for (int k = 0; k < cuda::kVector; k++) {
      const Rounded rounded = round_nearest<Small>(value.v[k]);
      value.v[k] = rounded.value;
      chunk |= rounded.code << (k * Small::kBits);
    }
    return chunk;
  }
}

/// Encodes values. args.options is 1 if scales are rounded up. A super-block of nvfp4 is the tiles
/// of four warps.
template <typename Small, bool kNv, bool kFeedback>
__global__ void __launch_bounds__(cuda::kThreads) encode_kernel(const Batch<EncodeParams> batch) {
  const EncodeParams args = tensor_of_block(batch);
  constexpr int kRows = kSmall;
  constexpr uint32_t kSizeBits = kNv ? kNvBlockBits : kBlockBits, kSize = 1 << kSizeBits;
  const cuda::Tile<kRows> tile = tile_of<kRows>(args);
  if (!kNv && tile.empty()) return;
  const size_t scales_at = kNv ? num_blocks(args.numel, kSuperBlock) * 4 : 0;
  auto* scale_codes = reinterpret_cast<uint8_t*>(args.scales) + scales_at;

  cuda::Vector<float> p[kRows];
  load_values<kFeedback>(tile, args, p, [&](const uint8_t* payload, int row) {
    return decode_row<Small>(
        Chunks<Small::kBits>::load(args, payload + codes_offset(args), tile, row),
        unit_of<kNv>(payload, tile, row, args.numel));
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
    if (tile.index(0) % kSuperBlock == 0) {
      args.scales[tile.first_block(kSuperBlockBits)] = second.unit;
    }
  }

  scale_codes += tile.first_block(kSizeBits);
  // Scales end at a multiple of four bytes, in zeros, which are the scales of blocks of zeros.
  const uint32_t there = tile.left_of_tile(padded(num_blocks(args.numel, kSize)) * kSize);
  float units[2][kRows];  // of codes, and their inverses
  each_block(top, units, [&](uint32_t at, float amax, float (&of)[2]) {
    const BlockScale scale = kNv ? nv_scale(float_bits(amax), super_amax, second)
                                 : mx_scale<Small>(float_bits(amax), args.options != 0);
    of[0] = unit_of_residual<true>(scale.unit);
    of[1] = scale.inv;
    if (at % kSize == 0 && at < there) {
      scale_codes[at / kSize] = static_cast<uint8_t>(scale.code);
    }
  });
#pragma unroll
  for (int row = 0; row < kRows; row++) {
    const float unit = units[0][row], inverse = units[1][row];
    cuda::Vector<float> value;
    for (int k = 0; k < cuda::kVector; k++) value.v[k] = p[row].v[k] * inverse;
    const uint32_t chunk = round_row<Small>(value);
    for (int k = 0; kFeedback && k < cuda::kVector; k++) {
      p[row].v[k] = p[row].v[k] - value.v[k] * unit;
    }
    Chunks<Small::kBits>::store(args, tile, row, inverse != 0.0f ? chunk : 0);
  }
  if (kFeedback) {
    for (int row = 0; kNv && row < kRows; row++) top[row] = float_bits(super_amax);
    Lost<kRows>(top).keep(tile, args, top, p);
    store_residual(tile, args, p);
  }
}

template <typename Small, bool kNv, bool kAdd>
__global__ void __launch_bounds__(cuda::kThreads) decode_kernel(const Batch<DecodeParams> batch) {
  const DecodeParams args = tensor_of_block(batch);
  decode_tile<kAdd, uint32_t>(
      args,
      [&](const auto& tile, int row) {
        return Scaled<uint32_t>{Chunks<Small::kBits>::load(args, args.codes, tile, row),
                                unit_of<kNv>(args.scales, tile, row, args.numel)};
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
