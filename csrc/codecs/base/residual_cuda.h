// Residuals in their stored form (stored.h), as kernels read and write them in the rows of a tile.
// Compiled by nvcc and NVRTC.
#pragma once
#include "codecs/base/params.h"
#include "codecs/base/stored.h"
#include "codecs/base/warp_cuda.h"

namespace pycomm::codecs::stored {

/// Four codes of int8, as they are stored.
union Codes {
  uint32_t word;
  int8_t code[cuda::kVector];
};

/// Loads the four values of a form with a code for each, in a row of a tile. Beyond the end zeros.
template <typename Form, int kTileRows>
__device__ __forceinline__ cuda::Vector<float> load_row(const cuda::Tile<kTileRows>& tile,
                                                        const uint8_t* from, int row) {
  const auto codes = tile.load(reinterpret_cast<const typename Form::Code*>(from), row);
  cuda::Vector<float> value;
  for (int k = 0; k < cuda::kVector; k++) value.v[k] = Form::decode(codes.v[k]);
  return value;
}

/// Loads the four values from value i on, of int8. Beyond the end zeros.
__device__ __forceinline__ cuda::Vector<float> load_int8(const uint8_t* from, size_t i,
                                                         size_t numel) {
  Codes codes{0};
  float scale = 0.0f;
  if (i < numel) {
    const uint8_t* const block = from + i / kBlock * kBlockBytes;
    scale = *reinterpret_cast<const float*>(block);
    codes.word = *reinterpret_cast<const uint32_t*>(block + sizeof(float) + i % kBlock);
  }
  cuda::Vector<float> value;
  for (int k = 0; k < cuda::kVector; k++) value.v[k] = value_of(codes.code[k], scale);
  return value;
}

/// Stores the four values from value i on, as int8. Called by all lanes of a warp, for one row;
/// values beyond the end are 0.
__device__ __forceinline__ void store_int8(uint8_t* to, size_t i, size_t numel,
                                           const cuda::Vector<float>& value) {
  constexpr int kLanesOfBlock = kBlock / cuda::kVector;
  uint32_t top = 0;
  for (int k = 0; k < cuda::kVector; k++) top = max(top, magnitude_bits(value.v[k]));
#pragma unroll
  for (int lane = 1; lane < kLanesOfBlock; lane *= 2) {
    top = max(top, __shfl_xor_sync(~0u, top, lane));
  }
  const float amax = bits_float(top), inv = inv_scale(amax, kTop);
  Codes codes{0};
  if (used(amax)) {
    for (int k = 0; k < cuda::kVector; k++) codes.code[k] = code_of(value.v[k], inv);
  }
  if (i / kBlock * kBlock >= numel) return;
  uint8_t* const block = to + i / kBlock * kBlockBytes;
  if (i % kBlock == 0) *reinterpret_cast<float*>(block) = scale_of(amax);
  *reinterpret_cast<uint32_t*>(block + sizeof(float) + i % kBlock) = codes.word;
}

}  // namespace pycomm::codecs::stored

namespace pycomm::codecs {

/// Returns the tile of this warp for an encode; `others` are arrays that it moves, too.
template <int kRows, typename... T>
__device__ __forceinline__ cuda::Tile<kRows> tile_of(const EncodeParams& args, const T*... others) {
  const bool by_block = args.form == stored::kInt8;  // which is no array of the tile
  return cuda::Tile<kRows>(block_of(args), args.numel, args.in, by_block ? nullptr : args.residual,
                           by_block ? nullptr : args.new_residual, others...);
}

/// Loads the residuals of a row. Beyond the end zeros.
template <int kRows>
__device__ __forceinline__ cuda::Vector<float> load_residual(const cuda::Tile<kRows>& tile,
                                                             const EncodeParams& args, int row,
                                                             bool swapped) {
  const uint8_t* const from = swapped ? args.new_residual : args.residual;
  cuda::Vector<float> value;
  if (args.form == stored::kFloat32) {
    value = stored::load_row<stored::Float32>(tile, from, row);
  } else if (args.form == stored::kBFloat16) {
    value = stored::load_row<stored::BFloat16>(tile, from, row);
  } else {
    value = stored::load_int8(from, tile.index(row), args.numel);
  }
  for (int k = 0; k < cuda::kVector; k++) value.v[k] = args.decay * value.v[k];
  return value;
}
template <int kRows>
__device__ __forceinline__ cuda::Vector<float> load_residual(const cuda::Tile<kRows>& tile,
                                                             const EncodeParams& args, int row) {
  return load_residual(tile, args, row, args.swapped != 0);
}

/// Stores the residuals of a tile. Called by all lanes of a warp.
template <int kRows>
__device__ __forceinline__ void store_residual(const cuda::Tile<kRows>& tile,
                                               const EncodeParams& args,
                                               const cuda::Vector<float> (&value)[kRows],
                                               bool swapped) {
  uint8_t* const to = swapped ? const_cast<uint8_t*>(args.residual) : args.new_residual;
  if (args.form == stored::kFloat32) {
    tile.store(reinterpret_cast<float*>(to), args.numel, value);
  } else if (args.form == stored::kBFloat16) {
    cuda::Vector<uint16_t> code[kRows];
#pragma unroll
    for (int row = 0; row < kRows; row++) {
      for (int k = 0; k < cuda::kVector; k++) {
        code[row].v[k] = stored::BFloat16::encode(value[row].v[k]);
      }
    }
    tile.store(reinterpret_cast<uint16_t*>(to), args.numel, code);
  } else {
    const int left = tile.left_of(args.numel);
#pragma unroll
    for (int row = 0; row < kRows; row++) {
      cuda::Vector<float> there = value[row];
      for (int k = 0; k < cuda::kVector; k++) {
        if (row * cuda::kRow + k >= left) there.v[k] = 0.0f;
      }
      stored::store_int8(to, tile.index(row), args.numel, there);
    }
  }
}

template <int kRows>
__device__ __forceinline__ void store_residual(const cuda::Tile<kRows>& tile,
                                               const EncodeParams& args,
                                               const cuda::Vector<float> (&value)[kRows]) {
  store_residual(tile, args, value, args.swapped != 0);
}

/// Loads the input of a tile: the values, or the average of contributions, which `decode(payload,
/// i)` reads from value i on. Beyond the end zeros.
template <int kRows, typename Decode>
__device__ __forceinline__ void load_input(const cuda::Tile<kRows>& tile, const EncodeParams& args,
                                           cuda::Vector<float> (&x)[kRows], const Decode& decode) {
  if (args.ranks == 0) {
    tile.load(args.in, x);
    return;
  }
  const uint8_t* payload = args.payloads;
  for (uint32_t rank = 0; rank < args.ranks; rank++, payload += args.stride) {
#pragma unroll
    for (int row = 0; row < kRows; row++) {
      const size_t i = tile.index(row);
      cuda::Vector<float> value{};
      if (i < args.numel) value = decode(payload, i);
      for (int k = 0; k < cuda::kVector; k++) {
        x[row].v[k] = rank == 0 ? value.v[k] : x[row].v[k] + value.v[k];
      }
    }
  }
  const int left = tile.left_of(args.numel);
#pragma unroll
  for (int row = 0; row < kRows; row++) {
    for (int k = 0; k < cuda::kVector; k++) {
      const bool there = row * cuda::kRow + k < left;
      x[row].v[k] = there ? x[row].v[k] / args.divisor : 0.0f;
    }
  }
}

}  // namespace pycomm::codecs
