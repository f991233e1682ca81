// topk: the values of largest magnitude, with their places. Wire format: docs/wire/topk.md.
// Everything that determines the bits is here and in block.h, compiled by gcc, nvcc and NVRTC.
#pragma once
#include "codecs/base/block.h"
#include "core/types.h"

namespace pycomm::codecs::topk {

constexpr int kWireVersion = 2;
/// Chosen values that share a scale (int8) or a pair of levels (bins2).
constexpr uint32_t kGroup = 256;
/// Values of a record with int12 indices; the last of a tensor may be shorter.
constexpr uint32_t kChunk = 4096;
constexpr float kTop8 = 127.0f;

enum class Values : uint8_t { float32, int8, bins2 };
enum class Indices : uint8_t { int32, int12 };

struct Format {
  double density = 0.01;
  /// Density as it is written: digits / 10^places. Counts are exact in it.
  uint64_t digits = 1;
  uint32_t places = 2;
  Values values = Values::float32;
  Indices indices = Indices::int32;

  /// Returns how many of n values travel: the least whole number that is not below density * n.
  size_t count(size_t n) const;
  /// True if each chunk is a record; else the whole tensor is one.
  bool chunks() const { return indices == Indices::int12; }
  /// Returns the values of a record of a tensor; the last may be shorter.
  size_t length(size_t numel) const { return chunks() ? kChunk : numel; }
};

/// Places of the parts of a record: n values of which k travel. A tensor is one record, or one for
/// each chunk, one after the other.
struct Record {
  Values values;
  Indices indices;
  size_t n;
  size_t k;
  size_t values_at;  ///< scales or levels are at 0
  size_t indices_at;
  size_t bytes;

  PYCOMM_HD Record(Values values, Indices indices, size_t n, size_t k)
      : values(values), indices(indices), n(n), k(k) {
    const size_t groups = (k + kGroup - 1) / kGroup;
    values_at = groups * (values == Values::float32 ? 0 : values == Values::int8 ? 4 : 8);
    const size_t value_bits = values == Values::float32 ? 32 : values == Values::int8 ? 8 : 2;
    const size_t index_bits = indices == Indices::int32 ? 32 : 12;
    indices_at = values_at + padded((k * value_bits + 7) / 8);
    bytes = indices_at + padded((k * index_bits + 7) / 8);
  }
};

/// Magnitude from which a value makes its record void: the record travels as NaN.
PYCOMM_HD uint32_t void_bits(Values values) {
  return values == Values::float32 ? kInfBits : float_bits(kHuge);
}

/// True if the record begins with a NaN: a scale, a level or a value, always a float32.
PYCOMM_HD bool begins_with_nan(const uint8_t* record) {
  return (*reinterpret_cast<const uint32_t*>(record) & 0x7fffffffu) > kInfBits;
}

/// int8: code as in quant. The largest magnitude of a group is below kHuge.
PYCOMM_HD int quantize8(float p, float inv) { return round_nearest(p * inv); }
PYCOMM_HD float dequantize8(int code, float scale) { return static_cast<float>(code) * scale; }

/// bins2: a power of two, so that p times its inverse has the largest magnitude of its group in
/// [2^14, 2^15).
struct BinScale {
  float scale;
  float inv;
};
PYCOMM_HD BinScale bin_scale(float amax) {
  if (!used(amax)) return {amax <= kTiny ? 0.0f : bits_float(kNanBits), 0.0f};
  const uint32_t bits = (float_bits(amax) & kInfBits) - (14u << 23);
  return {bits_float(bits), bits_float((254u << 23) - bits)};
}

/// bins2: a group's values are cut at the mean of their magnitudes, and a bin is decoded by the
/// mean of what fell into it. Magnitudes are added up as integers, so their order does not matter:
/// `inv` of bin_scale() takes them below 2^15, and 256 of them below 2^23.
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
/// bins2: the lower bit chooses the level, the upper one is the sign.
PYCOMM_HD float dequantize2(uint32_t code, float low, float high) {
  return bits_float(float_bits(code & 1 ? high : low) ^ (code & 2) << 30);
}

}  // namespace pycomm::codecs::topk
