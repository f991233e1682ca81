// Packing of chosen values in CUDA: a warp writes groups of kGroup values, a lane eight neighbours
// of each, which are whole words in every form; and reads single values. Compiled by nvcc and
// NVRTC.
#pragma once
#include "codecs/topk/select_cuda.h"

namespace pycomm::codecs::topk {

// ------------------------------------------------- what kernels share

struct Scratch {
  State* state;
  uint32_t* bins;
  uint2* around;
  uint32_t* kept;
  uint32_t* slots;
  Chosen chosen;

  __device__ explicit Scratch(const TopkParams& args) {
    const Layout layout(args.numel, args.k);
    const size_t warps = (args.numel + kTile - 1) / kTile;
    auto* words = reinterpret_cast<uint32_t*>(args.scratch);
    state = reinterpret_cast<State*>(words);
    bins = words + layout.bins;
    around = reinterpret_cast<uint2*>(words + layout.tiles);
    kept = words + layout.tiles + 2 * warps;
    slots = words + layout.slots;
    chosen = {reinterpret_cast<float*>(words + layout.p), words + layout.index,
              static_cast<uint32_t>(Layout::rounded(args.k))};
  }
};

__device__ __forceinline__ Record record_of(const TopkParams& args, size_t n, size_t k) {
  return {static_cast<Values>(args.values), static_cast<Indices>(args.indices), n, k};
}

// -------------------------------------------------------------------- writing

constexpr int kLaneValues = kGroup / cuda::kLanes;

/// Stores fields of kBits, from the first-th of the section on, as whole words. A word is there if
/// its first field is one of the `size`; fields beyond are 0.
template <int kBits>
__device__ __forceinline__ void store_fields(uint8_t* section, size_t first, int size,
                                             const uint32_t (&field)[kLaneValues]) {
  constexpr int kWords = kLaneValues * kBits / 32;
  auto* words = reinterpret_cast<uint32_t*>(section + first / kLaneValues * (kWords * 4));
#pragma unroll
  for (int w = 0; w < kWords; w++) {
    uint32_t word = 0;
#pragma unroll
    for (int j = 0; j < kLaneValues; j++) {
      const int shift = j * kBits - w * 32;
      if (shift >= 32 || shift <= -kBits) continue;
      word |= shift < 0 ? field[j] >> -shift : field[j] << shift;
    }
    if (w * 32 / kBits < size) words[w] = word;
  }
}

/// Stores fields of two bits each: two lanes share a word.
__device__ __forceinline__ void store_pairs(uint8_t* section, size_t first, int size,
                                            const uint32_t (&field)[kLaneValues]) {
  uint32_t half = 0;
#pragma unroll
  for (int j = 0; j < kLaneValues; j++) half |= field[j] << 2 * j;
  const uint32_t other = __shfl_xor_sync(kAll, half, 1);
  if (threadIdx.x % 2 == 0 && size > 0) {
    reinterpret_cast<uint32_t*>(section)[first / 16] = half | other << 16;
  }
}

/// Writes the codes and the levels of bins2; see write_values().
__device__ __forceinline__ void write_bins(uint8_t* section, float* levels, size_t first,
                                           const float (&p)[kLaneValues], int size, float amax,
                                           float (&value)[kLaneValues]) {
  const bool is_void = float_bits(amax) > kInfBits;
  const BinScale s = bin_scale(amax);
  uint32_t code[kLaneValues];
  Bins bins;
#pragma unroll
  for (int j = 0; j < kLaneValues; j++) {
    code[j] = j < size && !is_void ? bin_code(p[j], s.inv) : 0;
    bins.sum += code[j];
    bins.count += j < size;
  }
  bins.sum = sum_of_warp(bins.sum);
  bins.count = sum_of_warp(bins.count);
#pragma unroll
  for (int j = 0; j < kLaneValues; j++) {
    const bool upper = j < size && bins.upper(code[j]);
    bins.upper_sum += upper ? code[j] : 0;
    bins.upper_count += upper;
  }
  bins.upper_sum = sum_of_warp(bins.upper_sum);
  bins.upper_count = sum_of_warp(bins.upper_count);
  const float low = is_void ? bits_float(kNanBits) : bins.low(s.scale);
  const float high = is_void ? bits_float(kNanBits) : bins.high(s.scale);
  if (threadIdx.x % cuda::kLanes == 0) {
    levels[0] = low;
    levels[1] = high;
  }
#pragma unroll
  for (int j = 0; j < kLaneValues; j++) {
    const bool there = j < size && !is_void;
    code[j] = there ? (bins.upper(code[j]) ? 1u : 0u) | float_bits(p[j]) >> 31 << 1 : 0;
    value[j] = dequantize2(code[j], low, high);
  }
  store_pairs(section, first, size, code);
}

/// Writes the codes of p, of which the first `size` exist, and the values that they decode to.
/// Called by all lanes of the warp; a void record has NaN for p.
__device__ __forceinline__ void write_values(const Record& record, uint8_t* to, size_t group,
                                             const float (&p)[kLaneValues], int size,
                                             float (&value)[kLaneValues]) {
  const size_t first = group * kGroup + threadIdx.x % cuda::kLanes * kLaneValues;
  uint8_t* section = to + record.values_at;
  auto* scales = reinterpret_cast<float*>(to);
  uint32_t code[kLaneValues];
  if (record.values == Values::float32) {
#pragma unroll
    for (int j = 0; j < kLaneValues; j++) {
      value[j] = p[j];
      code[j] = float_bits(p[j]);
    }
    store_fields<32>(section, first, size, code);
    return;
  }
  uint32_t top = 0;
#pragma unroll
  for (int j = 0; j < kLaneValues; j++) {
    const uint32_t bits = magnitude_bits(p[j]);
    top = j < size && bits > top ? bits : top;
  }
  top = max_of_warp(top);
  const float amax = bits_float(top);
  if (record.values == Values::bins2) {
    return write_bins(section, scales + 2 * group, first, p, size, amax, value);
  }
  const bool is_void = top > kInfBits;
  const float s = scale(amax, kTop8), inv = inv_scale(amax, kTop8);
  if (threadIdx.x % cuda::kLanes == 0) scales[group] = s;
#pragma unroll
  for (int j = 0; j < kLaneValues; j++) {
    const int q = j < size && !is_void ? quantize8(p[j], inv) : 0;
    value[j] = dequantize8(q, s);
    code[j] = static_cast<uint32_t>(q) & 0xff;
  }
  store_fields<8>(section, first, size, code);
}

/// A chosen value and its index.
struct Place {
  float p;
  uint32_t index;
};

/// Writes the group-th kGroup of the chosen values, of which chosen(j) returns the j-th Place, and
/// their residuals. Called by all lanes of a warp. A void record has no chosen values.
template <bool kFeedback, typename F>
__device__ __forceinline__ void write_group(const Record& record, uint8_t* to, size_t group,
                                            const F& chosen, bool is_void, const float* residual,
                                            float* new_residual) {
  const size_t first = group * kGroup + threadIdx.x % cuda::kLanes * kLaneValues;
  const size_t left = first < record.k ? record.k - first : 0;
  const int size = static_cast<int>(left < kLaneValues ? left : kLaneValues);
  float p[kLaneValues], value[kLaneValues];
  uint32_t index[kLaneValues];
#pragma unroll
  for (int j = 0; j < kLaneValues; j++) {
    const bool there = j < size && !is_void;
    const Place place = there ? chosen(first + j) : Place{bits_float(kNanBits), 0};
    p[j] = place.p;
    index[j] = place.index < record.n ? place.index : 0;  // if fewer were chosen, it is an old one
  }
  write_values(record, to, group, p, size, value);
  uint8_t* section = to + record.indices_at;
  if (record.indices == Indices::int32) {
    store_fields<32>(section, first, size, index);
  } else {
    store_fields<12>(section, first, size, index);
  }
  if constexpr (kFeedback) {
#pragma unroll
    for (int j = 0; j < kLaneValues; j++) {
      if (j >= size || is_void) continue;
      new_residual[index[j]] = residual_of(p[j], value[j], residual[index[j]]);
    }
  }
}

// -------------------------------------------------------------------- reading

__device__ __forceinline__ uint32_t read_index(const Record& record, const uint8_t* from,
                                               size_t j) {
  const uint8_t* section = from + record.indices_at;
  if (record.indices == Indices::int32) return reinterpret_cast<const uint32_t*>(section)[j];
  const uint8_t* two = section + j / 2 * 3 + j % 2;
  return (two[0] | two[1] << 8) >> (j % 2 * 4) & 0xfff;
}

__device__ __forceinline__ float read_value(const Record& record, const uint8_t* from, size_t j) {
  const uint8_t* codes = from + record.values_at;
  if (record.values == Values::float32) return reinterpret_cast<const float*>(codes)[j];
  const auto* scales = reinterpret_cast<const float*>(from);
  if (record.values == Values::bins2) {
    const float* levels = scales + j / kGroup * 2;
    return dequantize2(codes[j / 4] >> j % 4 * 2 & 3, levels[0], levels[1]);
  }
  return dequantize8(static_cast<int8_t>(codes[j]), scales[j / kGroup]);
}

/// True if the j-th index is above the one before and lies in the record.
__device__ __forceinline__ bool index_in_order(const Record& record, const uint8_t* from,
                                               size_t j) {
  const uint32_t index = read_index(record, from, j);
  return index < record.n && (j == 0 || read_index(record, from, j - 1) < index);
}

}  // namespace pycomm::codecs::topk
