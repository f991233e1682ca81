// eden in CUDA. Wire format: docs/wire/eden.md. The arithmetic is in eden.h, rotations in
// rotation_cuda.h. Compiled by nvcc, or at run time by NVRTC, which takes the kernels only.
#include "codecs/base/kernels_cuda.h"
#include "codecs/eden.h"
#include "codecs/rotation/cuda.h"

namespace pycomm::codecs::eden {

/// Codes of a lane's four values in each row of a tile: from half a byte to two.
template <int kBits>
class Codes {
 public:
  __device__ Codes(const Tile& tile, uint8_t* codes) : at_(codes + tile.index(0) * kBits / 8) {}

  /// Called by all lanes of a warp; `there` if the payload has the row.
  __device__ void store(int row, bool there, uint32_t chunk) const {
    const bool even = lane_of() % 2 == 0;
    uint32_t whole = chunk;
    if (kBits % 2 != 0) {  // an even lane writes the byte that it shares
      const uint32_t other = __shfl_xor_sync(~0u, chunk, 1);
      whole = even ? chunk | other << 4 * kBits : chunk << 4;
    }
    uint8_t* const at = at_ + row * kBytes;
    if (!there) return;
    if (kBits == 4) {
      *reinterpret_cast<uint16_t*>(at) = static_cast<uint16_t>(whole);
    } else if (kBits == 2 || even) {
      at[0] = static_cast<uint8_t>(whole);
    }
    if (kBits == 3) at[1] = static_cast<uint8_t>(whole >> 8);
  }
  /// Returns the codes in the lowest bits; the others may be anything.
  __device__ uint32_t load(int row) const {
    const uint8_t* const at = at_ + row * kBytes;
    if (kBits == 4) return *reinterpret_cast<const uint16_t*>(at);
    const uint32_t whole = kBits == 3 ? at[0] | at[1] << 8 : at[0];
    return kBits == 2 ? whole : whole >> lane_of() % 2 * 4;
  }

 private:
  static constexpr size_t kBytes = cuda::kRow * kBits / 8;
  uint8_t* at_;
};

/// Returns the item of 1 << kDepth that `bit` says, the highest bit first.
template <int kDepth, typename F>
__device__ __forceinline__ float item(const bool* bit, const F& f) {
  float items[1 << kDepth];
#pragma unroll
  for (int i = 0; i < 1 << kDepth; i++) items[i] = f(i);
#pragma unroll
  for (int depth = kDepth - 1; depth >= 0; depth--) {
#pragma unroll
    for (int i = 0; i < 1 << depth; i++) items[i] = bit[depth] ? items[2 * i + 1] : items[2 * i];
  }
  return items[0];
}

/// Returns the level of a magnitude, and `sign` with it: the value of quantize(), by halving.
template <int kBits>
__device__ __forceinline__ float signed_level(uint32_t sign, float magnitude) {
  constexpr int kLevels = num_levels(kBits);
  bool beyond[kBits];
  const auto compare = [&](int depth, float border) { beyond[depth] = magnitude >= border; };
  if constexpr (kBits > 1) compare(0, border(kBits, kLevels / 2 - 1));
  if constexpr (kBits > 2) {
    compare(1, item<1>(beyond, [](int i) { return border(kBits, (2 * i + 1) * kLevels / 4 - 1); }));
  }
  if constexpr (kBits > 3) {
    compare(2, item<2>(beyond, [](int i) { return border(kBits, (2 * i + 1) * kLevels / 8 - 1); }));
  }
  const float value = item<kBits - 1>(beyond, [](int i) { return level(kBits, i); });
  return bits_float(float_bits(value) | sign);
}

/// Returns a word whose upper kBits are the code of a level with its sign. The factor and the
/// offset were found by trying: they take the bits of each level to its code; the factor is odd, so
/// that a sign adds the highest bit.
template <int kBits>
__device__ __forceinline__ uint32_t word_of(float level) {
  constexpr uint32_t kFactors[4] = {1, 1, 43, 30928185};
  constexpr uint32_t kOffsets[4] = {0, 0x3eaaa3, 0x9e5dd882, 0x95c17ac3};
  return float_bits(level) * kFactors[kBits - 1] + kOffsets[kBits - 1];
}

/// Decodes four codes with a scale. Called by all lanes of a warp.
template <int kBits>
__device__ __forceinline__ cuda::Vector<float> decode_row(uint32_t chunk, float scale) {
  cuda::Vector<float> value;
  if constexpr (kBits < 3) {
    const float near = level(kBits, 0) * scale, far = level(kBits, kBits - 1) * scale;
    for (int k = 0; k < cuda::kVector; k++) {
      const float v = kBits > 1 && (chunk >> k * kBits & 1) != 0 ? far : near;
      value.v[k] = (chunk >> ((k + 1) * kBits - 1) & 1) != 0 ? -v : v;
    }
  } else {
    const float mine = dequantize<kBits>(lane_of());  // lanes have the levels of all codes
    for (int k = 0; k < cuda::kVector; k++) {
      value.v[k] = bits_float(__shfl_sync(~0u, float_bits(mine), chunk >> k * kBits)) * scale;
    }
  }
  return value;
}

// ---------------------------------------------------------------- kernels

// Blocks that a multiprocessor runs at once, since one waits for memory while another computes; as
// many as leave registers for a tile. One has 32 KB on their way from memory.
constexpr int decoders_at_once(int bits, int size_bits) {
  return size_bits > 0 && bits < 3 ? 3 : 2;
}
constexpr int encoders_at_once(int bits, int size_bits) {
  return size_bits > 0 && bits < 4 ? 2 : 1;
}

template <int kBits, int kSizeBits, bool kMmse>
__global__ void __launch_bounds__(cuda::kThreads, encoders_at_once(kBits, kSizeBits))
    encode_kernel(const Batch<EncodeParams> batch) {
  const EncodeParams& args = place_of_block(batch);
  const uint32_t size_bits = size_bits_of<kSizeBits>(args), size = 1u << size_bits;
  const Tile tile = tile_of<kTileRows>(args);
  if (tile.empty() && size <= kTile) return;
  const RotationHeader header = write_header(args);
  const RotationSigns signs(header, first_of(tile));

  using Rotations = SharesOf<kSizeBits>;
  using Rows = Shares<cuda::kLanes>;
  Values y;
  load_sum(tile, args, batch.head.swapped, y);
  move<Rows, Rotations>(y);
  rotate<kSizeBits>(signs, size_bits, y);

  uint32_t top[kTileRows];
  max_of_rows(y, top);
  max_of_tile<kSizeBits>(top, size);
  const auto amax = [&](int row) { return bits_float(top[row]); };

  float energy[kTileRows], inverse[kTileRows], sum[kTileRows];
  add_halves<kSizeBits>(size, energy, [&](int row) {
    const float shrink = inverse_exponent(exponent_of(amax(row)));
    cuda::Vector<float> square;
    for (int k = 0; k < cuda::kVector; k++) {
      y[row].v[k] = y[row].v[k] * shrink;
      square.v[k] = y[row].v[k] * y[row].v[k];
    }
    return square;
  });
  each_block<kSizeBits>(size, inverse, [&](int row) {
    return used(amax(row)) ? sqrtf(static_cast<float>(size) / energy[row]) : 0.0f;
  });
  // From here on y has levels: of a rotation without codes the first one, whose code is 0.
  add_halves<kSizeBits>(size, sum, [&](int row) {
    const uint32_t signs_coded = used(amax(row)) ? 1u << 31 : 0;
    cuda::Vector<float> product;
    for (int k = 0; k < cuda::kVector; k++) {
      const float u = y[row].v[k];
      y[row].v[k] = signed_level<kBits>(float_bits(u) & signs_coded, fabsf(u * inverse[row]));
      product.v[k] = y[row].v[k] * u;
    }
    return product;
  });
  if constexpr (kMmse) {
    for (int row = 0; row < kTileRows; row++) energy[row] = sum[row];
    add_halves<kSizeBits>(size, sum, [&](int row) {
      cuda::Vector<float> square;
      for (int k = 0; k < cuda::kVector; k++) square.v[k] = y[row].v[k] * y[row].v[k];
      return square;
    });
  }
  float scale[kTileRows];
  each_block<kSizeBits>(size, scale, [&](int row) {
    const float factor = energy[row] / sum[row] * exponent_of(amax(row));
    return used(amax(row)) ? factor : codecs::scale(amax(row), 1.0f);
  });
#pragma unroll
  for (int row = 0; row < kTileRows; row++) {
    if (kSizeBits > 0 && row > 0) continue;  // all rows of a lane are of one rotation
    const size_t i = first_of(tile) + Rotations::place(row);
    const size_t place = size <= kTile ? Rotations::place(row) : i;
    if (place % size == 0 && i < args.numel) args.scales[i >> size_bits] = scale[row];
  }

  move<Rotations, Rows>(y);
  const size_t rotated = rotated_values(args.numel, size_bits);
  const Codes<kBits> codes(tile, args.codes);
#pragma unroll
  for (int row = 0; row < kTileRows; row++) {
    uint32_t chunk = 0;
    for (int k = cuda::kVector - 1; k >= 0; k--) {
      chunk = __funnelshift_l(word_of<kBits>(y[row].v[k]), chunk, kBits);
    }
    codes.store(row, size == kTile || tile.index(row) < rotated, chunk);
  }
  if (args.residual == nullptr) return;
  move<Rows, Rotations>(y);
#pragma unroll
  for (int row = 0; row < kTileRows; row++) {
    for (int k = 0; k < cuda::kVector; k++) y[row].v[k] = y[row].v[k] * scale[row];
  }
  unrotate<kSizeBits>(signs, size_bits, y);
  move<Rotations, Rows>(y);
  store_rest(tile, args, batch.head.swapped, y);
}

template <int kBits, int kSizeBits>
__global__ void __launch_bounds__(cuda::kThreads, decoders_at_once(kBits, kSizeBits))
    decode_kernel(const Batch<DecodeParams> batch) {
  const DecodeParams& args = place_of_block(batch);
  const uint32_t size_bits = size_bits_of<kSizeBits>(args), size = 1u << size_bits;
  const Tile tile(block_of(args), args.numel, args.out);
  if (tile.empty() && size <= kTile) return;
  const RotationSigns signs(read_header(args), first_of(tile));
  using Rows = Shares<cuda::kLanes>;

  Values y;
  const size_t rotated = rotated_values(args.numel, size_bits);
  const Codes<kBits> codes(tile, const_cast<uint8_t*>(args.codes));
  const auto there = [&](int row) { return size == kTile || tile.index(row) < rotated; };
  float scale[kTileRows];
  each_first(size, [&](int row) {
    scale[row] = there(row) ? args.scales[tile.index(row) >> size_bits] : 0.0f;
  });
  share_rows(scale, size);
#pragma unroll
  for (int row = 0; row < kTileRows; row++) {
    y[row] = decode_row<kBits>(there(row) ? codes.load(row) : 0, scale[row]);
  }
  move<Rows, SharesOf<kSizeBits>>(y);
  unrotate<kSizeBits>(signs, size_bits, y);
  move<SharesOf<kSizeBits>, Rows>(y);
  store_values(tile, args, y);
}

}  // namespace pycomm::codecs::eden

namespace pycomm::codecs {

#define SIZE(...)                                            \
  PYCOMM_KERNEL(eden::encode_kernel<__VA_ARGS__, false>),    \
      PYCOMM_KERNEL(eden::encode_kernel<__VA_ARGS__, true>), \
      PYCOMM_KERNEL(eden::decode_kernel<__VA_ARGS__>)
#define EDEN(bits) SIZE(bits, 0), SIZE(bits, 7), SIZE(bits, 10)
PYCOMM_KERNELS(eden, EDEN(1), EDEN(2), EDEN(3), EDEN(4));
#undef SIZE
#undef EDEN

}  // namespace pycomm::codecs
