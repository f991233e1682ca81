// eden in CUDA. Wire format: docs/wire/eden.md. The arithmetic is in eden.h, rotations in
// rotation_cuda.h. Compiled by nvcc, or at run time by NVRTC, which takes the kernels only.
#include "codecs/base/kernels_cuda.h"
#include "codecs/eden.h"
#include "codecs/rotation/cuda.h"

namespace pycomm::codecs::eden {

/// Codes of a lane's four values in each row of a tile: from half a byte to two.
template <int kBits>
class Rows {
 public:
  __device__ Rows(const Tile& tile, uint8_t* codes) : at_(codes + tile.index(0) * kBits / 8) {}

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

// ---------------------------------------------------------------- kernels

// Blocks that a multiprocessor runs at once, since one waits for memory while another computes.
// Encoders of unknown sizes spill registers for it, and were faster all the same on an H200.
constexpr int blocks_at_once(int bits, int size_bits) { return size_bits > 0 && bits < 3 ? 3 : 2; }

template <int kBits, int kSizeBits, bool kMmse>
__global__ void __launch_bounds__(cuda::kThreads, blocks_at_once(kBits, kSizeBits))
    encode_kernel(const Batch<EncodeParams> batch) {
  const EncodeParams& args = place_of_block(batch);
  const uint32_t size_bits = size_bits_of<kSizeBits>(args), size = 1u << size_bits;
  const Tile tile = tile_of<kTileRows>(args);
  if (tile.empty() && size <= kTile) return;
  const RotationHeader header = write_header(args);
  const RotationSigns signs(header, first_of(tile));

  Values y;
  load_sum(tile, args, batch.head.swapped, y);
  rotate<kSizeBits>(signs, size_bits, y);

  uint32_t top[kTileRows];
  max_of_rows(y, top);
  max_of_tile(top, size);

  float energy[kTileRows], sum[kTileRows];
  add_halves<kSizeBits>(size, energy, [&](int row) {
    const float shrink = inverse_exponent(exponent_of(bits_float(top[row])));
    cuda::Vector<float> square;
    for (int k = 0; k < cuda::kVector; k++) {
      y[row].v[k] = y[row].v[k] * shrink;
      square.v[k] = y[row].v[k] * y[row].v[k];
    }
    return square;
  });

  const auto inverse = [&](int row) { return sqrtf(static_cast<float>(size) / energy[row]); };
  const float inv_of_all = kSizeBits == 10 ? inverse(0) : 0.0f;
  const size_t rotated = rotated_values(args.numel, size_bits);
  const Rows<kBits> codes(tile, args.codes);
  uint32_t chunk[kTileRows];
  add_halves<kSizeBits>(size, sum, [&](int row) {
    const bool coded = used(bits_float(top[row]));
    const float inv = kSizeBits == 10 ? inv_of_all : inverse(row);
    chunk[row] = 0;
    cuda::Vector<float> product;
#pragma unroll
    for (int k = cuda::kVector - 1; k >= 0; k--) {
      const float u = y[row].v[k];
      const Coded level = quantize_magnitude<kBits>(fabsf(u * inv));
      const uint32_t sign = float_bits(u) & 1u << 31;
      product.v[k] = bits_float(float_bits(level.value) | sign) * u;
      chunk[row] = __funnelshift_l(float_bits(u), chunk[row], 1) * (1u << (kBits - 1)) + level.code;
    }
    if (!coded) chunk[row] = 0;
    codes.store(row, size == kTile || tile.index(row) < rotated, chunk[row]);
    return product;
  });
  const auto level_of = [&](int row, int k) {
    return dequantize<kBits>(chunk[row] >> (k * kBits));
  };
  if constexpr (kMmse) {
    for (int row = 0; row < kTileRows; row++) energy[row] = sum[row];
    add_halves<kSizeBits>(size, sum, [&](int row) {
      cuda::Vector<float> square;
      for (int k = 0; k < cuda::kVector; k++) square.v[k] = level_of(row, k) * level_of(row, k);
      return square;
    });
  }

  float scale[kTileRows];
  each_first(size, [&](int row) {
    const float amax = bits_float(top[row]);
    scale[row] =
        used(amax) ? energy[row] / sum[row] * exponent_of(amax) : codecs::scale(amax, 1.0f);
    const size_t i = tile.index(row);
    const size_t place = size <= kTile ? row * cuda::kRow + lane_of() * cuda::kVector : i;
    if (place % size == 0 && i < args.numel) args.scales[i >> size_bits] = scale[row];
  });
  if (args.residual == nullptr) return;
  share_rows(scale, size);
#pragma unroll
  for (int row = 0; row < kTileRows; row++) {
    for (int k = 0; k < cuda::kVector; k++) y[row].v[k] = level_of(row, k) * scale[row];
  }
  unrotate<kSizeBits>(signs, size_bits, y);
  store_rest(tile, args, batch.head.swapped, y);
}

template <int kBits, int kSizeBits>
__global__ void __launch_bounds__(cuda::kThreads, blocks_at_once(kBits, kSizeBits))
    decode_kernel(const Batch<DecodeParams> batch) {
  const DecodeParams& args = place_of_block(batch);
  const uint32_t size_bits = size_bits_of<kSizeBits>(args), size = 1u << size_bits;
  const Tile tile(block_of(args), args.numel, args.out);
  if (tile.empty() && size <= kTile) return;
  const RotationSigns signs(read_header(args), first_of(tile));

  Values y;
  const size_t rotated = rotated_values(args.numel, size_bits);
  const Rows<kBits> codes(tile, const_cast<uint8_t*>(args.codes));
  const auto there = [&](int row) { return size == kTile || tile.index(row) < rotated; };
  float scale[kTileRows];
  each_first(size, [&](int row) {
    scale[row] = there(row) ? args.scales[tile.index(row) >> size_bits] : 0.0f;
  });
  share_rows(scale, size);
#pragma unroll
  for (int row = 0; row < kTileRows; row++) {
    const uint32_t chunk = there(row) ? codes.load(row) : 0;
    for (int k = 0; k < cuda::kVector; k++) {
      y[row].v[k] = dequantize<kBits>(chunk >> (k * kBits)) * scale[row];
    }
  }
  unrotate<kSizeBits>(signs, size_bits, y);
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
