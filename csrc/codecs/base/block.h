// Rules of the block codecs: which blocks have a scale, the scale, and the residual. A block is a
// run of values that share one scale. Compiled by gcc, nvcc and NVRTC.
#pragma once
#include "core/floats.h"
#include "core/types.h"

namespace pycomm::codecs {

/// Bits of every NaN that an encoder writes (or their upper part), since hardware differs.
constexpr uint32_t kNanBits = 0x7fc00000u;
constexpr uint32_t kInfBits = 0x7f800000u;
/// Blocks at or below kTiny travel as zeros: 127 / amax would overflow further down. Blocks at or
/// above kHuge travel as NaN: top * scale could round to Inf further up.
constexpr float kTiny = 0x1p-100f;
constexpr float kHuge = 0x1p127f;
constexpr uint32_t kMinBlock = 32;
constexpr uint32_t kMaxBlock = 2048;

/// Bits of |x|. Their order as integers is the order of the values, with Inf and then NaN on top,
/// so the largest |x| of a block is an integer maximum: exact, order-free, and it vectorises.
PYCOMM_HD uint32_t magnitude_bits(float x) { return float_bits(x) & 0x7fffffffu; }
PYCOMM_HD bool is_finite(float x) { return magnitude_bits(x) < kInfBits; }

PYCOMM_HD size_t num_blocks(size_t numel, uint32_t block) { return (numel + block - 1) / block; }
PYCOMM_HD size_t padded(size_t bytes) { return (bytes + 3) / 4 * 4; }

/// True if a block has codes other than zero. `amax` is the largest |p| of a block, `top` the
/// largest code. False for NaN.
PYCOMM_HD bool used(float amax) { return amax > kTiny && amax < kHuge; }
PYCOMM_HD float scale(float amax, float top) {
  return used(amax) ? amax / top : amax <= kTiny ? 0.0f : bits_float(kNanBits);
}
PYCOMM_HD float inv_scale(float amax, float top) { return used(amax) ? top / amax : 0.0f; }

/// Meaning of a block's codes: code * unit. A value p has the code p * inv, rounded.
/// Codes of a block that is not used are zero; its residual is all of p if `unit` is 0, and it
/// travels as NaN if not.
struct Scale {
  float unit;
  float inv;
  bool used;
};

PYCOMM_HD Scale symmetric_scale(float amax, float top) {
  return {scale(amax, top), inv_scale(amax, top), used(amax)};
}

/// Adding then subtracting 1.5 * 2^23 rounds to nearest, ties to even, with plain float adds.
constexpr float kRound = 12582912.0f;
PYCOMM_HD int round_nearest(float v) { return static_cast<int>((v + kRound) - kRound); }

/// A value in the range of a small float: its code, and the value that the code represents.
struct Rounded {
  uint32_t code;
  float value;
};

/// Rounds in the float adder: `anchor` is the power of two whose last bit is worth one step of v's
/// binade, so in anchor + |v| the low bits count steps. Below the smallest normal number the step
/// stays the same.
template <typename Small>
PYCOMM_HD Rounded round_in_range(float v) {
  const uint32_t magnitude = magnitude_bits(v);
  const uint32_t sign = float_bits(v) ^ magnitude;
  const uint32_t exponent = magnitude & kInfBits;
  const uint32_t binade = exponent > Small::kSmallestNormal ? exponent : Small::kSmallestNormal;
  const uint32_t anchor = binade + (static_cast<uint32_t>(Small::kShift) << 23);
  const float sum = bits_float(magnitude) + bits_float(anchor);
  const uint32_t steps = float_bits(sum) - anchor;
  const float value = sum - bits_float(anchor);
  return {
      (steps + ((binade - Small::kSmallestNormal) >> Small::kShift)) | sign >> Small::kSignShift,
      bits_float(float_bits(value) | sign)};
}

/// Residual after a value p has travelled as `decoded`. For a value that travels as Inf or NaN the
/// loss scaler will skip the step, so the residual stays as it was.
PYCOMM_HD float residual_of(float p, float decoded, float residual) {
  return magnitude_bits(decoded) < kInfBits ? p - decoded : residual;
}

}  // namespace pycomm::codecs
