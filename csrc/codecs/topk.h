// topk: the values of largest magnitude, with their places. Wire format: docs/wire/topk.md.
// Everything that decides a bit is here and in block.h, compiled by gcc, nvcc and NVRTC.
#pragma once
#include "codecs/block.h"
#include "core/types.h"

namespace pycomm::codecs::topk {

constexpr int kWireVersion = 1;
/// Chosen values that share a scale (int8) or a pair of levels (int2).
constexpr uint32_t kGroup = 256;
constexpr float kTop8 = 127.0f;
/// Adding then subtracting 1.5 * 2^23 rounds to nearest, ties to even, with plain float adds.
constexpr float kRound = 12582912.0f;

/// Of a payload of variable size: bytes used, values that travel.
constexpr size_t kHeader = 8;

enum class Values : uint8_t { float32, float16, int8, int2 };
enum class Indices : uint8_t { int32, int16, int12, bitmap };

struct Format {
  double density = 0.01;
  Values values = Values::float32;
  Indices indices = Indices::int32;
  uint32_t chunk = 0;   ///< 0: the whole tensor is one record
  uint32_t sample = 0;  ///< 0: exactly k; else the stride of the sample that finds the threshold

  /// How many values of n travel.
  size_t count(size_t n) const;
  /// What a sampled threshold may choose: a quarter more.
  size_t most(size_t n) const;
  /// Values of a record of a tensor; the last may be shorter.
  size_t length(size_t numel) const { return chunk ? chunk : numel; }
};

/// Where the parts of a record are: n values of which k travel. A tensor is one record, or one for
/// each chunk, one after the other.
struct Record {
  Values values;
  Indices indices;
  size_t n;
  size_t k;
  size_t values_at;   ///< scales or levels are at 0
  size_t indices_at;  ///< of the bitmap, too
  size_t bytes;

  PYCOMM_HD Record(Values values, Indices indices, size_t n, size_t k)
      : values(values), indices(indices), n(n), k(k) {
    const size_t groups = (k + kGroup - 1) / kGroup;
    values_at = values == Values::int8 ? 4 * groups : values == Values::int2 ? 8 * groups : 0;
    const size_t value_bits = values == Values::float32   ? 32
                              : values == Values::float16 ? 16
                              : values == Values::int8    ? 8
                                                          : 2;
    const size_t index_bits = indices == Indices::int32 ? 32 : indices == Indices::int16 ? 16 : 12;
    indices_at = values_at + padded((k * value_bits + 7) / 8);
    bytes = indices_at + padded(((indices == Indices::bitmap ? n : k * index_bits) + 7) / 8);
  }
};

/// From this magnitude on a value makes its record void: the record travels as NaN.
PYCOMM_HD uint32_t void_bits(Values values) {
  return values == Values::int8 ? float_bits(kHuge) : kInfBits;
}

/// True if the record begins with a NaN: what stands first is a float of the kind `values`.
PYCOMM_HD bool begins_with_nan(Values values, const uint8_t* record) {
  if (values == Values::float16) {
    return (*reinterpret_cast<const uint16_t*>(record) & 0x7fffu) > 0x7c00u;
  }
  return (*reinterpret_cast<const uint32_t*>(record) & 0x7fffffffu) > kInfBits;
}

/// int8: as in quant. The largest magnitude of a group is below kHuge.
PYCOMM_HD int quantize8(float p, float inv) {
  return static_cast<int>((p * inv + kRound) - kRound);
}
PYCOMM_HD float dequantize8(int code, float scale) { return static_cast<float>(code) * scale; }

/// int2: the nearer of the smallest and the largest magnitude of the group, and the sign.
PYCOMM_HD uint32_t quantize2(float p, float low, float high) {
  const float a = bits_float(magnitude_bits(p));
  return (a - low > high - a ? 1u : 0u) | float_bits(p) >> 31 << 1;
}
PYCOMM_HD float dequantize2(uint32_t code, float low, float high) {
  return bits_float(float_bits(code & 1 ? high : low) ^ (code & 2) << 30);
}

}  // namespace pycomm::codecs::topk
