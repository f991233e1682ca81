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
  template <typename Params, typename Tile>
  __device__ static Codes load(const Params&, const uint8_t* codes, const Tile& tile, int row) {
    return reinterpret_cast<const Codes*>(codes)[tile.vector(row)];
  }
  /// Codes are padded with zeros to a multiple of four bytes.
  template <typename Tile>
  __device__ static void store(const EncodeParams& args, const Tile& tile, int row, Codes codes) {
    constexpr size_t kWord = 32 / kBits;
    const int left = tile.left_of((args.numel + kWord - 1) / kWord * kWord);
    if (row * cuda::kRow < left) reinterpret_cast<Codes*>(args.codes)[tile.vector(row)] = codes;
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
  if (block >= cuda::kRow) {
#pragma unroll
    for (int row = 0; row < kRows; row++) {
      // Rows of one block have the same already.
      const bool again = row > 0 && (row * cuda::kRow & (block - 1)) != 0;
      top[row] = again ? top[row - 1] : max_of_warp(top[row]);
    }
    return;
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

/// Computes what the block of each row has: f(at, largest, found) makes kCount numbers from its
/// largest magnitude, whose bits are in `top`, and `at`, the place in the tile of four lanes' first
/// value in the row. These lanes, whose blocks are the same, take a row each: to pass numbers on
/// takes less time than their divisions.
template <int kCount, int kRows, typename F>
__device__ __forceinline__ void each_block(const uint32_t (&top)[kRows], float (&of)[kCount][kRows],
                                           const F& f) {
  constexpr uint32_t kTogether = 4;
  static_assert(kRows % kTogether == 0);
  const uint32_t share = lane_of_warp() % kTogether, lane = lane_of_warp() - share;
#pragma unroll
  for (uint32_t first = 0; first < kRows; first += kTogether) {
    uint32_t mine = top[first];
#pragma unroll
    for (uint32_t row = 1; row < kTogether; row++) mine = share == row ? top[first + row] : mine;
    float found[kCount];
    f(lane * cuda::kVector + (first + share) * cuda::kRow, bits_float(mine), found);
#pragma unroll
    for (uint32_t row = 0; row < kTogether; row++) {
#pragma unroll
      for (int n = 0; n < kCount; n++) {
        of[n][first + row] =
            bits_float(__shfl_sync(~0u, float_bits(found[n]), static_cast<int>(row), kTogether));
      }
    }
  }
}

/// Returns the unit by which the values of codes are multiplied for the residual. All of p remains
/// where a block has no codes: also the sign of a zero, if it is the sign of its code's value.
template <bool kSignedZeros>
__device__ __forceinline__ float unit_of_residual(float unit) {
  return kSignedZeros && unit == 0.0f ? -0.0f : unit;
}

/// The rows of a tile whose blocks travel as NaN: they keep their residuals.
template <int kRows>
class Lost {
 public:
  /// `top` has the bits of the largest magnitude of each row's block.
  __device__ explicit Lost(const uint32_t (&top)[kRows]) {
    uint32_t largest = top[0];
#pragma unroll
    for (int row = 1; row < kRows; row++) largest = max(largest, top[row]);
    any_ = is_lost(largest);
  }

  __device__ void keep(const cuda::Tile<kRows>& tile, const EncodeParams& args,
                       const uint32_t (&top)[kRows], cuda::Vector<float> (&p)[kRows]) const {
    if (!any_) return;
#pragma unroll
    for (int row = 0; row < kRows; row++) {
      if (is_lost(top[row])) p[row] = load_residual(tile, args, row);
    }
  }

 private:
  __device__ static bool is_lost(uint32_t top) { return !(bits_float(top) < kHuge); }
  bool any_;
};

/// Loads the input of a tile (load_input), and adds the residuals if there is feedback.
template <bool kFeedback, int kRows, typename Decode>
__device__ __forceinline__ void load_values(const cuda::Tile<kRows>& tile, const EncodeParams& args,
                                            cuda::Vector<float> (&p)[kRows], const Decode& decode) {
  load_input(tile, args, p, decode);
  if (!kFeedback) return;
  each_residual(tile, args, args.swapped != 0, [&](int row, const cuda::Vector<float>& residual) {
    for (int k = 0; k < cuda::kVector; k++) p[row].v[k] = p[row].v[k] + residual.v[k];
  });
}

/// Returns where the codes begin in a payload of the same size as the one that is written.
__device__ __forceinline__ size_t codes_offset(const EncodeParams& args) {
  return args.codes - reinterpret_cast<const uint8_t*>(args.scales);
}

/// Returns the scale of the block in which a lane's values of a row lie.
template <typename Tile>
__device__ __forceinline__ float scale_of(const void* scales, const Tile& tile, int row,
                                          uint32_t bits) {
  return (static_cast<const float*>(scales) + tile.first_block(bits))[tile.next_block(row, bits)];
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

/// Decodes a tile of a payload: load(tile, row) returns the codes of a row, Scaled, and decode()
/// makes the four values of them. All is loaded before the first is decoded.
template <bool kAdd, typename Codes, typename Load, typename Decode>
__device__ __forceinline__ void decode_tile(const DecodeParams& args, const Load& load,
                                            const Decode& decode) {
  const cuda::Tile<kSmall> tile(block_of(args), args.numel, args.out);
  if (tile.empty()) return;
  const int left = tile.left_of(args.numel);
  Scaled<Codes> row_codes[kSmall];
#pragma unroll
  for (int row = 0; row < kSmall; row++) {
    row_codes[row] = Scaled<Codes>{0, 0.0f};
    if (row * cuda::kRow < left) row_codes[row] = load(tile, row);
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

/// Blocks on a multiprocessor, which leave registers enough to spill none.
template <typename Coder, bool kFeedback>
constexpr int kBlocks = kFeedback ? 3 : 4;

template <typename Coder, int kRows, bool kFeedback>
__global__ void __launch_bounds__(cuda::kThreads, kRows > kSmall ? 1 : kBlocks<Coder, kFeedback>)
    encode_blocks(const Batch<EncodeParams> batch) {
  const EncodeParams args = tensor_of_block(batch);
  const cuda::Tile<kRows> tile = tile_of<kRows>(args);
  if (tile.empty()) return;
  const uint32_t block = 1u << args.block_bits;

  cuda::Vector<float> p[kRows];
  load_values<kFeedback>(tile, args, p, [&](const uint8_t* payload, int row) {
    return Coder::decode(args, Coder::load(args, payload + codes_offset(args), tile, row),
                         scale_of(payload, tile, row, args.block_bits));
  });

  uint32_t amax_bits[kRows];
  max_of_rows(p, amax_bits);
  max_of_blocks(amax_bits, block);
  const float top = Coder::top(args);
  float* const scales = args.scales + tile.first_block(args.block_bits);
  const uint32_t there = tile.left_of_tile(args.numel);
  float units[2][kRows];  // scales and their inverses
  each_block(amax_bits, units, [&](uint32_t at, float amax, float (&of)[2]) {
    of[0] = scale(amax, top);
    of[1] = inv_scale(amax, top);
    if (at % block == 0 && at < there) scales[at >> args.block_bits] = of[0];
    of[0] = unit_of_residual<Coder::kSignedZeros>(of[0]);
  });

#pragma unroll
  for (int row = 0; row < kRows; row++) {
    const float s = units[0][row];
    const auto encoded = Coder::encode(p[row], units[1][row], args, tile.vector(row));
    Coder::store(args, tile, row, encoded.codes);
    for (int k = 0; kFeedback && k < cuda::kVector; k++) {
      p[row].v[k] = p[row].v[k] - encoded.value.v[k] * s;
    }
  }
  if (kFeedback) {
    Lost<kRows>(amax_bits).keep(tile, args, amax_bits, p);
    store_residual(tile, args, p);
  }
}

template <typename Coder, bool kAdd>
__global__ void __launch_bounds__(cuda::kThreads) decode_blocks(const Batch<DecodeParams> batch) {
  using Codes = typename Coder::Codes;
  const DecodeParams args = tensor_of_block(batch);
  decode_tile<kAdd, Codes>(
      args,
      [&](const auto& tile, int row) {
        return Scaled<Codes>{Coder::load(args, args.codes, tile, row),
                             scale_of(args.scales, tile, row, args.block_bits)};
      },
      [&](const Scaled<Codes>& row) { return Coder::decode(args, row.codes, row.scale); });
}

}  // namespace pycomm::codecs
