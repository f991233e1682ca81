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
template <int kRows, int kRowLanes = cuda::kLanes, typename... T>
__device__ __forceinline__ cuda::Tile<kRows, kRowLanes> tile_of(const EncodeParams& args,
                                                                const T*... others) {
  const bool by_block = args.form == stored::kInt8;  // which is no array of the tile
  return cuda::Tile<kRows, kRowLanes>(block_of(args), args.numel, args.in,
                                      by_block ? nullptr : args.residual,
                                      by_block ? nullptr : args.new_residual, others...);
}

/// Calls f(row, residuals) for each row, before their decay. Beyond the end they are zeros.
template <int kRows, int kRowLanes, typename F>
__device__ __forceinline__ void each_stored(const cuda::Tile<kRows, kRowLanes>& tile,
                                            const EncodeParams& args, bool swapped, const F& f) {
  const uint8_t* const from = swapped ? args.new_residual : args.residual;
  if (args.form == stored::kFloat32) {
    tile.each(reinterpret_cast<const float*>(from), f);
  } else {
#pragma unroll
    for (int row = 0; row < kRows; row++) {
      f(row, stored::load_int8(from, tile.index(row), args.numel));
    }
  }
}

/// The same after it.
template <int kRows, typename F>
__device__ __forceinline__ void each_residual(const cuda::Tile<kRows>& tile,
                                              const EncodeParams& args, bool swapped, const F& f) {
  each_stored(tile, args, swapped, [&](int row, cuda::Vector<float> value) {
    for (int k = 0; k < cuda::kVector; k++) value.v[k] = args.decay * value.v[k];
    f(row, value);
  });
}

/// Loads the residuals of a row. The other lanes need not call it. Beyond the end zeros.
template <int kRows, int kRowLanes>
__device__ __forceinline__ cuda::Vector<float> load_residual(
    const cuda::Tile<kRows, kRowLanes>& tile, const EncodeParams& args, int row, bool swapped) {
  const uint8_t* const from = swapped ? args.new_residual : args.residual;
  cuda::Vector<float> value;
  if (args.form == stored::kFloat32) {
    value = tile.load(reinterpret_cast<const float*>(from), row);
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

/// Stores the residuals of a tile, whose values beyond the end may be anything, as int8.
template <int kRows>
__device__ __forceinline__ void store_int8(const cuda::Tile<kRows>& tile, const EncodeParams& args,
                                           const cuda::Vector<float> (&value)[kRows], uint8_t* to) {
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

/// Stores the residuals of a tile. Called by all lanes of a warp. `store_int8(to)` stores those of
/// this form.
template <int kRows, int kRowLanes, typename F>
__device__ __forceinline__ void store_residual(const cuda::Tile<kRows, kRowLanes>& tile,
                                               const EncodeParams& args,
                                               const cuda::Vector<float> (&value)[kRows],
                                               bool swapped, const F& store_int8) {
  uint8_t* const to = swapped ? const_cast<uint8_t*>(args.residual) : args.new_residual;
  if (args.form == stored::kFloat32) {
    tile.store(reinterpret_cast<float*>(to), args.numel, value);
  } else {
    store_int8(to);
  }
}

template <int kRows>
__device__ __forceinline__ void store_residual(const cuda::Tile<kRows>& tile,
                                               const EncodeParams& args,
                                               const cuda::Vector<float> (&value)[kRows]) {
  store_residual(tile, args, value, args.swapped != 0,
                 [&](uint8_t* to) { store_int8(tile, args, value, to); });
}

/// Adds the contributions of all ranks: decode(payload, row) makes the values of a row, all of them
/// if `kWhole`. Beyond the end zeros.
template <bool kWhole, int kRows, typename Decode>
__device__ __forceinline__ void add_payloads(const cuda::Tile<kRows>& tile,
                                             const EncodeParams& args,
                                             cuda::Vector<float> (&x)[kRows],
                                             const Decode& decode) {
  const uint8_t* payload = args.payloads;
  const int left = kWhole ? kRows * cuda::kRow : tile.left_of(args.numel);
  const auto there = [&](int row) { return kWhole || row * cuda::kRow < left; };
#pragma unroll
  for (int row = 0; row < kRows; row++) {
    x[row] = cuda::Vector<float>{};
    if (there(row)) x[row] = decode(payload, row);
  }
#pragma unroll 1
  for (uint32_t rank = 1; rank < args.ranks; rank++) {
    payload += args.stride;
#pragma unroll
    for (int row = 0; row < kRows; row++) {
      if (!there(row)) continue;
      const cuda::Vector<float> value = decode(payload, row);
      for (int k = 0; k < cuda::kVector; k++) x[row].v[k] = x[row].v[k] + value.v[k];
    }
  }
#pragma unroll
  for (int row = 0; row < kRows; row++) {
    for (int k = 0; k < cuda::kVector; k++) {
      if (row * cuda::kRow + k >= left) x[row].v[k] = 0.0f;
    }
  }
}

/// Divides values by the divisor of an average. A product by the inverse of a power of two rounds
/// as the division does.
template <int kRows>
__device__ __forceinline__ void divide(float divisor, cuda::Vector<float> (&x)[kRows]) {
  const uint32_t bits = float_bits(divisor);
  if ((bits & 0x7fffffu) == 0) {
    const float inverse = bits_float((254u << 23) - bits);
#pragma unroll
    for (int row = 0; row < kRows; row++) {
      for (int k = 0; k < cuda::kVector; k++) x[row].v[k] = x[row].v[k] * inverse;
    }
  } else {
#pragma unroll
    for (int row = 0; row < kRows; row++) {
      for (int k = 0; k < cuda::kVector; k++) x[row].v[k] = x[row].v[k] / divisor;
    }
  }
}

/// Loads the input of a tile: the values, or the average of contributions, of which
/// `decode(payload, row)` makes those of a row. Beyond the end zeros.
template <int kRows, typename Decode>
__device__ __forceinline__ void load_input(const cuda::Tile<kRows>& tile, const EncodeParams& args,
                                           cuda::Vector<float> (&x)[kRows], const Decode& decode) {
  if (args.ranks == 0) {
    tile.load(args.in, x);
    return;
  }
  if (tile.whole()) {
    add_payloads<true>(tile, args, x, decode);
  } else {
    add_payloads<false>(tile, args, x, decode);
  }
  divide(args.divisor, x);
}

}  // namespace pycomm::codecs
