// eden in CUDA. Wire format: docs/wire/eden.md. The arithmetic is in eden.h, rotations in
// rotation_cuda.h. Compiled by nvcc, or at run time by NVRTC, which takes the kernels only.
#include "codecs/base/bits_cuda.h"
#include "codecs/base/kernels_cuda.h"
#include "codecs/eden.h"
#include "codecs/rotation/cuda.h"

namespace pycomm::codecs::eden {

/// With half a bit two values share a unit.
PYCOMM_HD constexpr int unit_bits(int bits, bool half) { return half ? 2 * bits + 1 : bits; }

/// Returns a bit for each of four values from `place` of the tile on: it is 1 if the value is the
/// wide one of its pair.
__device__ __forceinline__ uint32_t wide_bits(const RandomBits& choice, uint32_t place,
                                              uint32_t half) {
  // A rotation larger than a tile has its other half in another warp, at the same place of a tile.
  const uint32_t second = choice.from(place & ~half & (kTile - 1));
  const bool far = ((warp_of() * kTile + place) & half) != 0;
  return far ? second : ~second;
}

/// Returns the codes of the lanes with the other values of the pairs; four codes are a word.
__device__ __forceinline__ void partners(const uint32_t (&codes)[kTileRows], uint32_t half,
                                         uint32_t (&others)[kTileRows]) {
  if (half >= kTile) {
    cuda::Vector<float> mine[2];
#pragma unroll
    for (int row = 0; row < kTileRows; row++) mine[row / 4].v[row % 4] = bits_float(codes[row]);
    show(mine);
    const cuda::Vector<float> theirs[2] = {shown(0, half / kTile), shown(1, half / kTile)};
#pragma unroll
    for (int row = 0; row < kTileRows; row++) others[row] = float_bits(theirs[row / 4].v[row % 4]);
    return;
  }
#pragma unroll
  for (int row = 0; row < kTileRows; row++) {
    if (half == 4 * cuda::kRow) others[row] = codes[row ^ 4];
    if (half == 2 * cuda::kRow) others[row] = codes[row ^ 2];
    if (half == cuda::kRow) others[row] = codes[row ^ 1];
    if (half < cuda::kRow) others[row] = __shfl_xor_sync(~0u, codes[row], half / cuda::kVector);
  }
}

/// Joins four codes, a byte each, to four of `bits` bits.
__device__ __forceinline__ uint32_t joined(uint32_t codes, int bits) {
  uint32_t chunk = 0;
  for (int k = 0; k < cuda::kVector; k++) chunk |= (codes >> (8 * k) & 255) << (k * bits);
  return chunk;
}

template <int kUnitBits>
__device__ __forceinline__ void store_units(uint8_t* codes, size_t i, size_t numel,
                                            uint32_t chunk) {
  if constexpr (kUnitBits == 1) {
    store_bits(codes, i, numel, chunk);
  } else {
    store_codes(codes, i, numel, kUnitBits, chunk);
  }
}

/// Stores the units of pairs. Both lanes of a pair hold its unit, and the one with the near half of
/// a rotation stores it. Near halves of less than a row, which leave gaps, are moved together two
/// rows at a time.
template <int kUnitBits>
__device__ __forceinline__ void store_pairs(const EncodeParams& args, const Tile& tile,
                                            size_t units, const uint32_t (&unit)[kTileRows]) {
  const uint32_t half = 1u << (args.rotation_bits - 1);
  const uint32_t lane = lane_of();
#pragma unroll
  for (int row = 0; row < kTileRows; row++) {
    if (half >= cuda::kRow) {
      const size_t i = tile.index(row);
      if (i & half) continue;
      store_units<kUnitBits>(args.codes, (i & ~size_t{half - 1}) / 2 + (i & (half - 1)), units,
                             joined(unit[row], kUnitBits));
    } else if (row % 2 == 0) {
      const uint32_t place = lane % 16 * cuda::kVector;
      const uint32_t from = ((place & ~(half - 1)) * 2 + (place & (half - 1))) / cuda::kVector;
      const uint32_t even = __shfl_sync(~0u, unit[row], from);
      const uint32_t odd = __shfl_sync(~0u, unit[row + 1], from);
      store_units<kUnitBits>(args.codes, (first_of(tile) + row * cuda::kRow) / 2 + lane * 4, units,
                             joined(lane < 16 ? even : odd, kUnitBits));
    }
  }
}

/// Returns the code of a value, which takes part in the sums with its level; `wide` says which of a
/// pair's two tables it has.
template <int kBits, bool kHalf>
__device__ __forceinline__ Coded quantize_one(float u, float inv, bool wide) {
  if constexpr (kHalf) {
    const Coded more = quantize<kBits + 1>(u, inv), less = quantize<kBits>(u, inv);
    return wide ? more : less;
  } else {
    return quantize<kBits>(u, inv);
  }
}
template <int kBits, bool kHalf>
__device__ __forceinline__ float dequantize_one(uint32_t code, bool wide) {
  if constexpr (kHalf) {
    const float more = dequantize<kBits + 1>(code), less = dequantize<kBits>(code);
    return wide ? more : less;
  } else {
    return dequantize<kBits>(code);
  }
}

// ---------------------------------------------------------------- kernels

// Blocks that a multiprocessor runs at once, since one waits for memory while another computes.
// Some encoders spill registers for it, up to 128 bytes of a thread, and are still faster: by a
// sixth to a third on an H200. Half bits need a third of the registers more.
template <bool kHalf>
constexpr int kEncodeBlocks = kHalf ? 1 : 2;
constexpr int kDecodeBlocks = 2;

template <int kBits, bool kHalf>
__global__ void __launch_bounds__(cuda::kThreads, kEncodeBlocks<kHalf>)
    encode_kernel(const Batch<EncodeParams> batch) {
  const EncodeParams args = tensor_of_block(batch);
  const uint32_t size = 1u << args.rotation_bits;
  const Tile tile = tile_of<kTileRows>(args);
  if (tile.empty() && size <= kTile) return;
  const RotationHeader header = write_header(args);
  const RotationSigns signs(header, first_of(tile));
  const RandomBits choice(header, kHalf ? first_of(tile) & ~size_t{size / 2} : 0, kChoiceTensor);
  const auto wide_of = [&](int row) {
    const uint32_t place = row * cuda::kRow + lane_of() * cuda::kVector;
    return kHalf ? wide_bits(choice, place, size / 2) : 0;
  };

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
      const uint32_t wide = wide_of(row);
      codes[row] = 0;
      for (int k = 0; k < cuda::kVector; k++) {
        const Coded coded = quantize_one<kBits, kHalf>(y[row].v[k], inv, wide >> k & 1);
        codes[row] |= coded.code << (8 * k);
        terms[row].v[k] = coded.value * y[row].v[k];
      }
      if (!used(bits_float(top[row]))) codes[row] = 0;
    }
    // The halves of a rotation are the two values of each pair.
    add_halves(terms, size, sum);
    if (args.options & kMmse) {
#pragma unroll
      for (int row = 0; row < kTileRows; row++) {
        const uint32_t wide = wide_of(row);
        energy[row] = sum[row];
        for (int k = 0; k < cuda::kVector; k++) {
          const float value = dequantize_one<kBits, kHalf>(codes[row] >> (8 * k), wide >> k & 1);
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
    constexpr int kUnitBits = unit_bits(kBits, kHalf);
    if constexpr (kHalf) {
      uint32_t unit[kTileRows];
      partners(codes, size / 2, unit);
#pragma unroll
      for (int row = 0; row < kTileRows; row++) {
        const uint32_t wide = wide_of(row), other = unit[row];
        unit[row] = 0;
        for (int k = 0; k < cuda::kVector; k++) {
          const uint32_t a = codes[row] >> (8 * k) & 255, b = other >> (8 * k) & 255;
          unit[row] |= (wide >> k & 1 ? b | a << kBits : a | b << kBits) << (8 * k);
        }
      }
      store_pairs<kUnitBits>(args, tile, rotated / 2, unit);
    } else {
#pragma unroll
      for (int row = 0; row < kTileRows; row++) {
        store_units<kUnitBits>(args.codes, tile.index(row), rotated, joined(codes[row], kUnitBits));
      }
    }

    if (args.residual == nullptr) return;
#pragma unroll
    for (int row = 0; row < kTileRows; row++) {
      const uint32_t wide = wide_of(row);
      for (int k = 0; k < cuda::kVector; k++) {
        const float value = dequantize_one<kBits, kHalf>(codes[row] >> (8 * k), wide >> k & 1);
        y[row].v[k] = value * scale[row];
      }
    }
  });
}

template <int kBits, bool kHalf>
__global__ void __launch_bounds__(cuda::kThreads, kDecodeBlocks)
    decode_kernel(const Batch<DecodeParams> batch) {
  const DecodeParams args = tensor_of_block(batch);
  const uint32_t size = 1u << args.rotation_bits, half = size / 2;
  const Tile tile(block_of(args), args.numel, args.out);
  if (tile.empty() && size <= kTile) return;
  const RotationHeader header = read_header(args);
  const RotationSigns signs(header, first_of(tile));
  const RandomBits choice(header, kHalf ? first_of(tile) & ~size_t{half} : 0, kChoiceTensor);

  Values y;
  const size_t rotated = rotated_values(args.numel, args.rotation_bits);
#pragma unroll
  for (int row = 0; row < kTileRows; row++) {
    const size_t i = tile.index(row);
    const bool there = i < rotated;
    const size_t unit = kHalf ? (i & ~size_t{size - 1}) / 2 + (i & (half - 1)) : i;
    constexpr int kUnitBits = unit_bits(kBits, kHalf);
    const uint32_t chunk =
        there ? load_codes(args.codes, unit, kHalf ? rotated / 2 : rotated, kUnitBits) : 0;
    const float s = there ? args.scales[i >> args.rotation_bits] : 0.0f;
    const uint32_t place = row * cuda::kRow + lane_of() * cuda::kVector;
    const uint32_t wide = kHalf ? wide_bits(choice, place, half) : 0;
    for (int k = 0; k < cuda::kVector; k++) {
      const uint32_t code = chunk >> (k * kUnitBits);
      const bool is_wide = wide >> k & 1;
      const float value =
          dequantize_one<kBits, kHalf>(kHalf && is_wide ? code >> kBits : code, is_wide);
      y[row].v[k] = value * s;
    }
  }
  store_unrotated(tile, args, signs, y);
}

}  // namespace pycomm::codecs::eden

namespace pycomm::codecs {

#define EDEN(bits, half) \
  PYCOMM_KERNEL(eden::encode_kernel<bits, half>), PYCOMM_KERNEL(eden::decode_kernel<bits, half>)
PYCOMM_KERNELS(eden, EDEN(0, true), EDEN(1, true), EDEN(1, false), EDEN(2, true), EDEN(2, false),
               EDEN(3, true), EDEN(3, false), EDEN(4, false), EDEN(5, false), EDEN(6, false),
               EDEN(7, false), EDEN(8, false));
#undef EDEN

}  // namespace pycomm::codecs
