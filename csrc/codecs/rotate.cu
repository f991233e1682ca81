// rotate in CUDA: a tile is rotated in registers and passed to the inner codec there. Wire format:
// docs/wire/rotate.md. Compiled by nvcc, or at run time by NVRTC, which takes the kernels only.
#include "codecs/base/bits_cuda.h"
#include "codecs/base/kernels_cuda.h"
#include "codecs/cast_cuda.h"
#include "codecs/quant_cuda.h"
#include "codecs/rotation/cuda.h"
#include "codecs/sign.h"

namespace pycomm::codecs::rotate {

// ------------------------------------------------------------ inner codecs
//
// encode() writes scales and codes of a tile, where `numel` values exist in all, and leaves in y
// the values that they decode to; decode() reads them.

/// Inner codec: cast without blocks.
template <typename Type>
struct Plain {
  using Code = typename Type::Code;

  __device__ static void encode(const EncodeParams& args, const Tile&, size_t numel, Values& y) {
    auto* codes = reinterpret_cast<Code*>(args.codes);
    cuda::Vector<Code> code[kTileRows];
#pragma unroll
    for (int row = 0; row < kTileRows; row++) {
      for (int k = 0; k < cuda::kVector; k++) {
        code[row].v[k] = Type::encode(y[row].v[k]);
        y[row].v[k] = Type::decode(code[row].v[k]);
      }
    }
    Tile(numel, codes).store(codes, numel, code);
  }

  __device__ static void decode(const DecodeParams& args, const Tile&, size_t numel, Values& y) {
    const auto* codes = reinterpret_cast<const Code*>(args.codes);
    cuda::Vector<Code> code[kTileRows];
    Tile(numel, codes).load(codes, code);
#pragma unroll
    for (int row = 0; row < kTileRows; row++) {
      for (int k = 0; k < cuda::kVector; k++) y[row].v[k] = Type::decode(code[row].v[k]);
    }
  }
};

/// Inner codec: cast with blocks.
template <typename Coder>
struct Blocks {
  using Codes = typename Coder::Codes;

  __device__ static void encode(const EncodeParams& args, const Tile& tile, size_t numel,
                                Values& y) {
    const uint32_t block = 1u << args.block_bits;
    uint32_t top[kTileRows];
    max_of_rows(y, top);
    max_of_tile(top, block);
#pragma unroll
    for (int row = 0; row < kTileRows; row++) {
      const size_t i = tile.index(row);
      const float amax = bits_float(top[row]);
      const float s = scale(amax, Coder::kTop);
      if (i % block == 0 && i < numel) args.scales[i >> args.block_bits] = s;
      Encoded<Codes> encoded{};
      if (used(amax)) encoded = Coder::encode(y[row], inv_scale(amax, Coder::kTop), args, i / 4);
      if (i < numel) reinterpret_cast<Codes*>(args.codes)[i / 4] = encoded.codes;
      for (int k = 0; k < cuda::kVector; k++) y[row].v[k] = encoded.value.v[k] * s;
    }
  }

  __device__ static void decode(const DecodeParams& args, const Tile& tile, size_t numel,
                                Values& y) {
#pragma unroll
    for (int row = 0; row < kTileRows; row++) {
      const size_t i = tile.index(row);
      const bool there = i < numel;
      const Codes codes = there ? reinterpret_cast<const Codes*>(args.codes)[i / 4] : 0;
      y[row] = Coder::decode(codes, there ? args.scales[i >> args.block_bits] : 0.0f);
    }
  }
};

template <bool kRandom>
struct Quant {
  __device__ static void encode(const EncodeParams& args, const Tile& tile, size_t numel,
                                Values& y) {
    const quant::Format f = quant::format_of(args.options);
    const uint32_t block = 1u << args.block_bits;
    uint32_t high[kTileRows], low[kTileRows];
#pragma unroll
    for (int row = 0; row < kTileRows; row++) {
      quant::extremes(y[row], tile.index(row), numel, high[row], low[row]);
    }
    max_of_tile(high, block);
    max_of_tile(low, block);
#pragma unroll
    for (int row = 0; row < kTileRows; row++) {
      const size_t i = tile.index(row);
      const Scale s = quant::scale_of(f, high[row], low[row]);
      if (i % block == 0 && i < numel) {
        quant::store_scale(f, args.scales, i >> args.block_bits, numel - i <= block, s);
      }
      const Encoded<uint32_t> encoded = quant::encode_row<kRandom>(f, s, y[row], args, i, numel);
      store_codes(args.codes, i, numel, f.bits, encoded.codes);
      y[row] = encoded.value;
    }
  }

  __device__ static void decode(const DecodeParams& args, const Tile& tile, size_t numel,
                                Values& y) {
    const quant::Format f = quant::format_of(args.options);
#pragma unroll
    for (int row = 0; row < kTileRows; row++) {
      const size_t i = tile.index(row);
      const bool there = i < numel;
      const uint32_t chunk = there ? load_codes(args.codes, i, numel, f.bits) : 0;
      const Scale s = there ? quant::load_scale(f, args.scales, i >> args.block_bits) : Scale{};
      y[row] = quant::decode_row(f, s, chunk);
    }
  }
};

struct Sign {
  __device__ static void encode(const EncodeParams& args, const Tile& tile, size_t numel,
                                Values& y) {
    const uint32_t block = 1u << args.block_bits;
    Values magnitudes;
#pragma unroll
    for (int row = 0; row < kTileRows; row++) {
      for (int k = 0; k < cuda::kVector; k++) {
        magnitudes[row].v[k] = bits_float(magnitude_bits(y[row].v[k]));
      }
    }
    float sum[kTileRows];
    add_halves(magnitudes, block, sum);
#pragma unroll
    for (int row = 0; row < kTileRows; row++) {
      const size_t i = tile.index(row), begin = i >> args.block_bits << args.block_bits;
      const size_t left = begin < numel ? numel - begin : 1;
      const float mean = sign::mean_scale(sum[row], left < block ? left : block);
      if (i == begin && i < numel) args.scales[i >> args.block_bits] = mean;
      uint32_t chunk = 0;
      if (used(mean)) {
        for (int k = 0; k < cuda::kVector; k++) chunk |= sign::quantize(y[row].v[k]) << k;
      }
      store_bits(args.codes, i, numel, chunk);
      for (int k = 0; k < cuda::kVector; k++) y[row].v[k] = sign::dequantize(chunk >> k, mean);
    }
  }

  __device__ static void decode(const DecodeParams& args, const Tile& tile, size_t numel,
                                Values& y) {
#pragma unroll
    for (int row = 0; row < kTileRows; row++) {
      const size_t i = tile.index(row);
      const bool there = i < numel;
      const uint32_t chunk = there ? load_codes(args.codes, i, numel, 1) : 0;
      const float s = there ? args.scales[i >> args.block_bits] : 0.0f;
      for (int k = 0; k < cuda::kVector; k++) y[row].v[k] = sign::dequantize(chunk >> k, s);
    }
  }
};

// ---------------------------------------------------------------- kernels

/// True if a warp needs no other of its block. If not, a warp with an empty tile stays for the
/// barriers.
__device__ __forceinline__ bool alone(uint32_t rotation_bits, uint32_t block_bits) {
  return max(1u << rotation_bits, 1u << block_bits) <= kTile;
}

// Blocks that a multiprocessor runs at once, since one waits for memory while another computes.
// Some encoders spill registers for it, up to 132 bytes of a thread, and are still faster: by a
// sixth to a third on an H200.
constexpr int kEncodeBlocks = 2;
constexpr int kDecodeBlocks = 2;

template <typename Inner>
__global__ void __launch_bounds__(cuda::kThreads, kEncodeBlocks)
    encode_kernel(const EncodeParams args) {
  const Tile tile(args.numel, args.in, args.residual, args.new_residual);
  if (tile.empty() && alone(args.rotation_bits, args.block_bits)) return;
  const RotationSigns signs(write_header(args), first_of(tile));
  Values y;
  const size_t rotated = rotated_values(args.numel, args.rotation_bits);
  encode_rotated(tile, args, signs, y, [&] { Inner::encode(args, tile, rotated, y); });
}

template <typename Inner>
__global__ void __launch_bounds__(cuda::kThreads, kDecodeBlocks)
    decode_kernel(const DecodeParams args) {
  const Tile tile(args.numel, args.out);
  if (tile.empty() && alone(args.rotation_bits, 0)) return;
  const RotationSigns signs(read_header(args), first_of(tile));
  Values y;
  Inner::decode(args, tile, rotated_values(args.numel, args.rotation_bits), y);
  store_unrotated(tile, args, signs, y);
}

}  // namespace pycomm::codecs::rotate

namespace pycomm::codecs {

#define ROTATE(Inner) \
  PYCOMM_KERNEL(rotate::encode_kernel<Inner>), PYCOMM_KERNEL(rotate::decode_kernel<Inner>)
PYCOMM_KERNELS(rotate, ROTATE(rotate::Plain<cast::Float32>), ROTATE(rotate::Plain<cast::Float16>),
               ROTATE(rotate::Plain<cast::BFloat16>),
               ROTATE(rotate::Blocks<cast::Coder<cast::Float8E4M3>>),
               ROTATE(rotate::Blocks<cast::Coder<cast::Float8E5M2>>), ROTATE(rotate::Quant<false>),
               ROTATE(rotate::Sign), PYCOMM_KERNEL(rotate::encode_kernel<rotate::Quant<true>>));
#undef ROTATE

}  // namespace pycomm::codecs
