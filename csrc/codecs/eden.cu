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
  /// `first` is the place of the first value of the tile.
  __device__ Codes(size_t first, uint8_t* codes)
      : at_(codes + (first + Rows::place(0)) * kBits / 8) {}

  /// Called by all lanes of a warp; `there` if the payload has the row.
  __device__ void store(int row, bool there, uint32_t chunk) const {
    const bool even = lane_of_warp() % 2 == 0;
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
    return kBits == 2 ? whole : whole >> lane_of_warp() % 2 * 4;
  }

 private:
  static constexpr size_t kBytes = cuda::kRow * kBits / 8;
  uint8_t* at_;
};

/// Levels of magnitudes. With more than two of them, a magnitude is in a bin that has one border at
/// most: a lane knows the level at the lower edge of a bin, and the border from there on.
template <int kBits>
class Levels {
 public:
  /// Called by all lanes of a warp, as of().
  __device__ __forceinline__ Levels() {
    if constexpr (kBits > 2) {
      const float edge = static_cast<float>(lane_of_warp()) * kWidth - kWidth / 2;
      for (int i = 0; i + 1 < num_levels(kBits); i++) {
        const bool beyond = edge >= border(kBits, i);
        level_ = beyond ? level(kBits, i + 1) : level_;
        border_ = beyond ? border(kBits, i + 1) : border_;
      }
    }
  }

  /// Returns the level of |v| with `sign`, or the first one if it is not `coded`.
  __device__ __forceinline__ float of(float v, uint32_t sign, bool coded) const {
    float value = level(kBits, 0);
    if constexpr (kBits == 2) value = fabsf(v) >= border(kBits, 0) ? level(kBits, 1) : value;
    if constexpr (kBits > 2) {
      const float magnitude = fminf(fabsf(v), coded ? kMost : 0.0f);
      // The lowest bits of the sum are the number of the bin.
      const uint32_t bin = float_bits(magnitude + (1 << 23) * kWidth);
      const bool beyond = magnitude >= bits_float(__shfl_sync(~0u, float_bits(border_), bin));
      value = bits_float(__shfl_sync(~0u, float_bits(level_), bin + (beyond ? 1 : 0)));
    }
    return bits_float(float_bits(value) | sign);
  }

 private:
  static constexpr float kWidth = 0.25f;
  static constexpr float kMost = 30 * kWidth;  ///< beyond all borders, in a bin before the last one
  float level_ = level(kBits, 0);
  float border_ = border(kBits, 0);  ///< beyond the last one any: the next bin has the same level
};

/// Returns a word whose upper kBits are the code of a level with its sign. The factor and the
/// offset were found by trying: they take the bits of each level to its code; the factor is odd, so
/// that a sign adds the highest bit.
template <int kBits>
__device__ __forceinline__ uint32_t word_of(float level) {
  constexpr uint32_t kFactors[4] = {1, 1, 43, 30928185};
  constexpr uint32_t kOffsets[4] = {0, 0x3eaaa3, 0x9e5dd882, 0x95c17ac3};
  return float_bits(level) * kFactors[kBits - 1] + kOffsets[kBits - 1];
}

/// Returns the codes of four levels with their signs.
template <int kBits>
__device__ __forceinline__ uint32_t codes_of(const cuda::Vector<float>& levels) {
  if constexpr (kBits == 2) {
    // The upper byte of a level has its sign on top, and is 62 or 63 below that.
    uint32_t word[cuda::kVector];
    for (int k = 0; k < cuda::kVector; k++) word[k] = float_bits(levels.v[k]);
    const uint32_t bytes = __byte_perm(__byte_perm(word[0], word[1], 0x73),
                                       __byte_perm(word[2], word[3], 0x73), 0x5410);
    // A sum has the lower bits of the codes at bits 0, 2, 4, 6, and the signs at 7, 9, 11, 13.
    const uint32_t sum = __dp4a(bytes, 0x40100401u, 0u - 62 * 0x55);
    return (sum & 0x55u) | (sum >> 6 & ~0x55u);
  } else {
    uint32_t chunk = 0;
    for (int k = cuda::kVector - 1; k >= 0; k--) {
      chunk = __funnelshift_l(word_of<kBits>(levels.v[k]), chunk, kBits);
    }
    return chunk;
  }
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
    const float mine = dequantize<kBits>(lane_of_warp());  // lanes have the levels of all codes
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
constexpr int encoders_at_once(int bits, int size_bits) { return size_bits > 0 ? 2 : 1; }

template <int kBits, int kSizeBits, bool kMmse>
__global__ void __launch_bounds__(cuda::kThreads, encoders_at_once(kBits, kSizeBits))
    encode_kernel(const Batch<EncodeParams> batch) {
  const EncodeParams& args = place_of_block(batch);
  const uint32_t size_bits = size_bits_of<kSizeBits>(args), size = 1u << size_bits;
  using Rotations = SharesOf<kSizeBits>;
  const auto tile = tile_of<kTileRows, kRowLanes<kSizeBits>>(args);
  if (tile.empty() && size <= kTile) return;
  const size_t first = Rotations::first(tile);
  const RotationHeader header = write_header(args);
  const SignsOf<kSizeBits> signs(header, first);

  Values p, y;
  const bool swapped = args.residual != nullptr && is_swapped(batch.head.swapped);
  load_sum(tile, args, swapped, p);
#pragma unroll
  for (int row = 0; row < kTileRows; row++) y[row] = p[row];
  rotate<kSizeBits>(signs, size_bits, y);

  uint32_t top[kTileRows];
  max_of_rows(y, top);
  max_of_tile<kSizeBits>(top, size);
  const auto amax = [&](int row) { return bits_float(top[row]); };
  uint32_t largest = top[0];
#pragma unroll
  for (int row = 1; row < kTileRows; row++) largest = max(largest, top[row]);
  const bool plain = __ballot_sync(~0u, largest < float_bits(kPlain)) == ~0u;

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
  const Levels<kBits> levels;
  add_halves<kSizeBits>(size, sum, [&](int row) {
    const bool coded = used(amax(row));
    const uint32_t signs_coded = coded ? 1u << 31 : 0;
    cuda::Vector<float> product;
    for (int k = 0; k < cuda::kVector; k++) {
      const float u = y[row].v[k];
      y[row].v[k] = levels.of(u * inverse[row], float_bits(u) & signs_coded, coded);
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
    const size_t i = tile.index(row), place = size <= kTile ? Rotations::place(row) : i;
    if (place % size == 0 && i < args.numel) args.scales[i >> size_bits] = scale[row];
  }

  uint32_t chunk[kTileRows];
#pragma unroll
  for (int row = 0; row < kTileRows; row++) chunk[row] = codes_of<kBits>(y[row]);
  move<Rotations, Rows>(chunk);
  const size_t rotated = rotated_values(args.numel, size_bits);
  const Codes<kBits> codes(first, args.codes);
#pragma unroll
  for (int row = 0; row < kTileRows; row++) {
    codes.store(row, size == kTile || first + Rows::place(row) < rotated, chunk[row]);
  }
  if (args.residual == nullptr) return;
  // Of a plain tile the scale between the transforms is a factor of the first one. That changes no
  // bit: a scale is 0 or, since used() magnitudes are above 2^-100, more than 2^-113, so that no
  // product is subnormal either way.
  constexpr bool kKnown = kSizeBits > 0;
  const float between = scale_between(size_bits);
#pragma unroll
  for (int row = 0; row < kTileRows; row++) {
    const float factor = kKnown && plain ? scale[row] * between : scale[row];
    for (int k = 0; k < cuda::kVector; k++) y[row].v[k] = y[row].v[k] * factor;
  }
  if (kKnown && !plain) {
    move<Rotations, Rows>(y);
    unrotate<0>(SignsOf<0>(header, first), size_bits, between, y);
    move<Rows, Rotations>(y);
    return store_rest<Rotations>(tile, args, swapped, false, p, y);
  }
  unrotate<kSizeBits>(signs, size_bits, kKnown ? 1.0f : between, y);
  store_rest<Rotations>(tile, args, swapped, kKnown || plain, p, y);
}

template <int kBits, int kSizeBits>
__global__ void __launch_bounds__(cuda::kThreads, decoders_at_once(kBits, kSizeBits))
    decode_kernel(const Batch<DecodeParams> batch) {
  const DecodeParams& args = place_of_block(batch);
  const uint32_t size_bits = size_bits_of<kSizeBits>(args), size = 1u << size_bits;
  using Rotations = SharesOf<kSizeBits>;
  const typename Rotations::Tile tile(block_of(args), args.numel, args.out);
  if (tile.empty() && size <= kTile) return;
  const size_t first = Rotations::first(tile);
  const SignsOf<kSizeBits> signs(read_header(args), first);

  Values y;
  const size_t rotated = rotated_values(args.numel, size_bits);
  const Codes<kBits> codes(first, const_cast<uint8_t*>(args.codes));
  const auto at = [&](int row) { return first + Rows::place(row); };
  const auto there = [&](int row) { return size == kTile || at(row) < rotated; };
  float scale[kTileRows];
  each_first(size,
             [&](int row) { scale[row] = there(row) ? args.scales[at(row) >> size_bits] : 0.0f; });
  share_rows(scale, size);
#pragma unroll
  for (int row = 0; row < kTileRows; row++) {
    y[row] = decode_row<kBits>(there(row) ? codes.load(row) : 0, scale[row]);
  }
  move<Rows, Rotations>(y);
  unrotate<kSizeBits>(signs, size_bits, scale_between(size_bits), y);
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
