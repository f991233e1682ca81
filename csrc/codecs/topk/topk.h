// topk: the values of largest magnitude, with their places. Wire format: docs/wire/topk.md.
// Everything that determines the bits is here and in block.h, compiled by gcc, nvcc and NVRTC.
#pragma once
#include "codecs/base/block.h"
#include "core/types.h"

namespace pycomm::codecs::topk {

constexpr int kWireVersion = 2;
/// Chosen values that share a scale (float16, int8) or a pair of levels (int2, bins2).
constexpr uint32_t kGroup = 256;
constexpr float kTop8 = 127.0f;
/// Adding then subtracting 1.5 * 2^23 rounds to nearest, ties to even, with plain float adds.
constexpr float kRound = 12582912.0f;

/// Header of a payload of variable size: bytes used, values that travel.
constexpr size_t kHeader = 8;

enum class Values : uint8_t { float32, float16, int8, int2, bins2 };

/// True if a group has two levels, and its codes two bits: they are decoded alike.
PYCOMM_HD bool has_levels(Values values) {
  return values == Values::int2 || values == Values::bins2;
}

enum class Indices : uint8_t { int32, int16, int12, bitmap };

struct Format {
  double density = 0.01;
  /// Density as it is written: digits / 10^places. Counts are exact in it.
  uint64_t digits = 1;
  uint32_t places = 2;
  Values values = Values::float32;
  Indices indices = Indices::int32;
  uint32_t chunk = 0;   ///< 0: the whole tensor is one record
  uint32_t sample = 0;  ///< 0: exactly k; else one of so many values is in the sample

  /// Returns how many of n values travel: the least whole number that is not below density * n.
  size_t count(size_t n) const;
  /// Largest and smallest number of values that a sampled threshold may choose: a quarter more and
  /// less.
  size_t most(size_t n) const;
  size_t least(size_t n) const;
  /// Returns how many values are in the sample: one of each stretch of `sample` values.
  size_t sampled(size_t n) const { return n == 0 || sample == 0 ? 0 : (n - 1) / sample + 1; }
  /// Returns the values of a record of a tensor; the last may be shorter.
  size_t length(size_t numel) const { return chunk ? chunk : numel; }
};

/// Places of the parts of a record: n values of which k travel. A tensor is one record, or one for
/// each chunk, one after the other.
struct Record {
  Values values;
  Indices indices;
  size_t n;
  size_t k;
  size_t values_at;   ///< scales or levels are at 0
  size_t indices_at;  ///< also of the bitmap
  size_t bytes;

  PYCOMM_HD Record(Values values, Indices indices, size_t n, size_t k)
      : values(values), indices(indices), n(n), k(k) {
    const size_t groups = (k + kGroup - 1) / kGroup;
    values_at = groups * (values == Values::float32 ? 0 : has_levels(values) ? 8 : 4);
    const size_t value_bits = values == Values::float32   ? 32
                              : values == Values::float16 ? 16
                              : values == Values::int8    ? 8
                                                          : 2;
    const size_t index_bits = indices == Indices::int32 ? 32 : indices == Indices::int16 ? 16 : 12;
    indices_at = values_at + padded((k * value_bits + 7) / 8);
    bytes = indices_at + padded(((indices == Indices::bitmap ? n : k * index_bits) + 7) / 8);
  }
};

/// Magnitude from which a value makes its record void: the record travels as NaN.
PYCOMM_HD uint32_t void_bits(Values values) {
  return values == Values::float32 || values == Values::int2 ? kInfBits : float_bits(kHuge);
}

/// True if the record begins with a NaN: a scale, a level or a value, always a float32.
PYCOMM_HD bool begins_with_nan(const uint8_t* record) {
  return (*reinterpret_cast<const uint32_t*>(record) & 0x7fffffffu) > kInfBits;
}

/// Returns the place of the sampled value in its stretch of `length` values.
PYCOMM_HD size_t sampled_place(size_t length, uint32_t random) {
  return static_cast<size_t>(uint64_t{random} * length >> 32);
}

/// float16: a power of two, so that p times its inverse has the largest magnitude of its group in
/// [2^14, 2^15): far from Inf, and much smaller values stay far from zero.
struct HalfScale {
  float scale;
  float inv;
};
PYCOMM_HD HalfScale half_scale(float amax) {
  if (!used(amax)) return {amax <= kTiny ? 0.0f : bits_float(kNanBits), 0.0f};
  const uint32_t bits = (float_bits(amax) & kInfBits) - (14u << 23);
  return {bits_float(bits), bits_float((254u << 23) - bits)};
}

/// int8: code as in quant. The largest magnitude of a group is below kHuge.
PYCOMM_HD int quantize8(float p, float inv) {
  return static_cast<int>((p * inv + kRound) - kRound);
}
PYCOMM_HD float dequantize8(int code, float scale) { return static_cast<float>(code) * scale; }

/// int2: code of the nearer of the smallest and the largest magnitude of the group, and the sign.
PYCOMM_HD uint32_t quantize2(float p, float low, float high) {
  const float a = bits_float(magnitude_bits(p));
  return (a - low > high - a ? 1u : 0u) | float_bits(p) >> 31 << 1;
}
PYCOMM_HD float dequantize2(uint32_t code, float low, float high) {
  return bits_float(float_bits(code & 1 ? high : low) ^ (code & 2) << 30);
}

/// bins2: a group's values are cut at the mean of their magnitudes, and a bin is decoded by the
/// mean of what fell into it. Magnitudes are added up as integers, so their order does not matter:
/// `inv` of half_scale() takes them below 2^15, and 256 of them below 2^23.
struct Bins {
  uint32_t sum = 0;    ///< of all codes of the group
  uint32_t count = 0;  ///< values of the group, above 0
  uint32_t upper_sum = 0;
  uint32_t upper_count = 0;

  PYCOMM_HD bool upper(uint32_t code) const { return code * count > sum; }
  PYCOMM_HD float low(float scale) const {
    return static_cast<float>(sum - upper_sum) / static_cast<float>(count - upper_count) * scale;
  }
  /// That of the lower bin, if the upper one is empty.
  PYCOMM_HD float high(float scale) const {
    if (upper_count == 0) return low(scale);
    return static_cast<float>(upper_sum) / static_cast<float>(upper_count) * scale;
  }
};
PYCOMM_HD uint32_t bin_code(float p, float inv) {
  return static_cast<uint32_t>((bits_float(magnitude_bits(p)) * inv + kRound) - kRound);
}

}  // namespace pycomm::codecs::topk
