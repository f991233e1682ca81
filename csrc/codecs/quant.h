// quant: block-wise integers of 2 to 8 bits. Wire format: docs/wire/quant.md. Everything that
// determines the bits is here and in block.h, compiled by gcc, nvcc and NVRTC.
#pragma once
#include "codecs/base/block.h"
#include "core/philox.h"
#include "core/types.h"

namespace pycomm::codecs::quant {

constexpr int kWireVersion = 2;
/// Adding then subtracting 1.5 * 2^23 rounds to nearest, ties to even, with plain float adds.
constexpr float kRound = 12582912.0f;

enum class Rounding : uint8_t { nearest, stochastic, correlated };

struct Format {
  int bits = 8;  ///< 2 to 8
  uint32_t block = 256;
  Rounding rounding = Rounding::nearest;
  bool minmax = false;    ///< codes from the least value up; else symmetric around zero
  bool bfloat16 = false;  ///< scales in bfloat16; else in float32
};

/// Returns the largest code of a symmetric range: 127 for 8 bits, 1 for 2 bits.
PYCOMM_HD constexpr int top(int bits) { return (1 << (bits - 1)) - 1; }
PYCOMM_HD int top(const Format& f) { return f.minmax ? (1 << f.bits) - 1 : top(f.bits); }

/// The payload is the scales, then the codes. A block has one scale, or unit and low.
PYCOMM_HD size_t scale_bytes(const Format& f) { return (f.bfloat16 ? 2 : 4) * (f.minmax ? 2 : 1); }
PYCOMM_HD size_t codes_offset(const Format& f, size_t numel) {
  return padded(num_blocks(numel, f.block) * scale_bytes(f));
}
PYCOMM_HD size_t encoded_bytes(const Format& f, size_t numel) {
  return codes_offset(f, numel) + padded((numel * f.bits + 7) / 8);
}

// ------------------------------------------------------------------- scales

/// Returns the next bfloat16 that is not less; x is not negative, or NaN.
PYCOMM_HD float bfloat16_above(float x) {
  return bits_float((float_bits(x) + 0xffffu) & 0xffff0000u);
}
/// Returns the next bfloat16 that is not greater; x is finite.
PYCOMM_HD float bfloat16_below(float x) {
  const uint32_t bits = float_bits(x);
  return bits_float((bits >> 31 ? bits + 0xffffu : bits) & 0xffff0000u);
}

/// Converts to integers whose order is the order of the values, with -0 below +0 and NaN at both
/// ends; from_order() is the inverse.
PYCOMM_HD int32_t to_order(float x) {
  const auto bits = static_cast<int32_t>(float_bits(x));
  return bits ^ ((bits >> 31) & 0x7fffffff);
}
PYCOMM_HD float from_order(int32_t order) {
  return bits_float(static_cast<uint32_t>(order ^ ((order >> 31) & 0x7fffffff)));
}

/// Returns the scale of a symmetric block with the largest magnitude `amax`. A bfloat16 scale is
/// rounded up, so that no code leaves the range.
PYCOMM_HD Scale symmetric_scale(const Format& f, float amax) {
  Scale s = codecs::symmetric_scale(amax, static_cast<float>(top(f)));
  if (f.bfloat16) {
    s.unit = bfloat16_above(s.unit);
    s.inv = s.used ? 1.0f / s.unit : 0.0f;
  }
  return s;
}

/// Returns the scale of a block of values from `low` to `high`. A block that spans no more than
/// kTiny travels as its value next to zero, or as zero if it has values on both sides: no value is
/// then further from its decoded value than from zero.
PYCOMM_HD Scale minmax_scale(const Format& f, float low, float high) {
  const uint32_t a = magnitude_bits(low), b = magnitude_bits(high);
  const float nan = bits_float(kNanBits);
  // The limit is half of kHuge, since the span may be twice the largest magnitude.
  if (!(bits_float(a > b ? a : b) < kHuge / 2)) return {nan, 0.0f, nan, false};
  if (f.bfloat16) low = bfloat16_below(low);
  const float span = high - low;
  if (!(span > kTiny)) {
    const float next = high < 0.0f ? bits_float(float_bits(high) & (f.bfloat16 ? ~0xffffu : ~0u))
                                   : (low > 0.0f ? low : 0.0f);
    return {0.0f, 0.0f, next, true};
  }
  float unit = span / static_cast<float>(top(f));
  if (f.bfloat16) unit = bfloat16_above(unit);
  return {unit, 1.0f / unit, low, true};
}

// -------------------------------------------------------------------- codes

/// Returns the code of v = (p - low) * inv. No finite p gets beyond the top, since v is at most top
/// * (1 + 2^-22).
PYCOMM_HD int round_nearest(float v) { return static_cast<int>((v + kRound) - kRound); }

/// Rounds up or down by chance: up if the upper 31 bits of `random` are below the fraction, which
/// is exact in float32 because it is taken from the magnitude.
PYCOMM_HD int round_randomly(float v, uint32_t random, int top) {
  const float a = bits_float(magnitude_bits(v));
  const int down = static_cast<int>(a);
  const int threshold = static_cast<int>((a - static_cast<float>(down)) * 0x1p31f);
  const int near = down + (static_cast<int>(random >> 1) < threshold ? 1 : 0);
  const int q = near < top ? near : top;  // v may be a hair above the top
  return v < 0.0f ? -q : q;
}

/// Returns what a rank adds to the random words that all ranks share, so that the words of one
/// value are spread evenly over the ranks; 0 if they are not shared.
PYCOMM_HD uint32_t rank_shift(Rounding rounding, uint32_t rank, uint32_t ranks) {
  if (rounding != Rounding::correlated) return 0;
  return static_cast<uint32_t>((uint64_t{1} << 32) / ranks * rank);
}

PYCOMM_HD float dequantize(int q, float unit) { return static_cast<float>(q) * unit; }
PYCOMM_HD float dequantize(int q, float unit, float low) {
  return static_cast<float>(q) * unit + low;
}

/// Packs two codes of 4 bits in a byte: the value with the even index is the low nibble.
PYCOMM_HD uint8_t pack4(int even, int odd) {
  return static_cast<uint8_t>((even & 15) | (odd & 15) << 4);
}
PYCOMM_HD int unpack4(uint32_t nibble) { return static_cast<int>((nibble & 15u) ^ 8u) - 8; }

/// Bits of EncodeParams::options and DecodeParams::options; the lower eight are the width.
constexpr uint32_t kMinMax = 1u << 8;
constexpr uint32_t kBFloat16 = 1u << 9;

PYCOMM_HD uint32_t options_of(const Format& f) {
  return static_cast<uint32_t>(f.bits) | (f.minmax ? kMinMax : 0) | (f.bfloat16 ? kBFloat16 : 0);
}
}  // namespace pycomm::codecs::quant
