// mx: the microscaling floats of OCP, and NVFP4: 8, 6 or 4 bits with a scale of one byte for 32 or
// 16 values. Wire format: docs/wire/mx.md. Everything that determines the bits is here, in block.h
// and in core/floats.h, compiled by gcc, nvcc and NVRTC.
#pragma once
#include "codecs/base/block.h"
#include "core/floats.h"
#include "core/types.h"

namespace pycomm::codecs::mx {

constexpr int kWireVersion = 2;
/// Values that share a scale in NVFP4, and that share its second, float32 scale.
constexpr uint32_t kNvBlockBits = 4, kNvBlock = 1 << kNvBlockBits;
constexpr uint32_t kSuperBlockBits = 11, kSuperBlock = 1 << kSuperBlockBits;
constexpr uint32_t kBlockBits = 5, kBlock = 1 << kBlockBits;

enum class Kind : uint8_t { fp8_e4m3, fp8_e5m2, fp6_e2m3, fp6_e3m2, fp4_e2m1, nvfp4 };

struct Format {
  Kind kind = Kind::fp8_e4m3;
  bool ceil = false;  ///< scales rounded up, so that no value saturates; not in nvfp4
};

PYCOMM_HD int bits(Kind kind) {
  return kind == Kind::fp8_e4m3 || kind == Kind::fp8_e5m2   ? 8
         : kind == Kind::fp6_e2m3 || kind == Kind::fp6_e3m2 ? 6
                                                            : 4;
}
PYCOMM_HD uint32_t block(Kind kind) { return kind == Kind::nvfp4 ? kNvBlock : kBlock; }

/// The payload is the second-level scales, if it is nvfp4, then the scales, then the codes.
PYCOMM_HD size_t scales_offset(Kind kind, size_t numel) {
  return kind == Kind::nvfp4 ? num_blocks(numel, kSuperBlock) * 4 : 0;
}
PYCOMM_HD size_t codes_offset(Kind kind, size_t numel) {
  return scales_offset(kind, numel) + padded(num_blocks(numel, block(kind)));
}
PYCOMM_HD size_t encoded_bytes(Kind kind, size_t numel) {
  return codes_offset(kind, numel) + padded((numel * bits(kind) + 7) / 8);
}

// ------------------------------------------------------------------- scales

/// E8M0 scale: a power of two by its float32 exponent; 255 is NaN. `amax`: bits of the largest
/// magnitude.
constexpr uint32_t kNanScale = 255;
template <typename Small>
PYCOMM_HD uint32_t scale_code(uint32_t amax, bool ceil) {
  if (!(bits_float(amax) < kHuge)) return kNanScale;
  constexpr uint32_t kMaxExponent = (Small::kLargestBits >> 23) - 127;
  const uint32_t up = ceil && (amax & 0x7fffffu) > (Small::kLargestBits & 0x7fffffu) ? 1 : 0;
  const uint32_t exponent = (amax >> 23) + up;
  return exponent > kMaxExponent ? exponent - kMaxExponent : 0;
}
PYCOMM_HD float decode_scale(uint32_t code) {
  return bits_float(code == kNanScale ? kNanBits : code == 0 ? 1u << 22 : code << 23);
}
/// Returns 1 / decode_scale(code) for a code from scale_code(); 0 for kNanScale.
PYCOMM_HD float inv_scale(uint32_t code) {
  return bits_float(code == kNanScale ? 0 : (254 - code) << 23);
}

/// Returns the second-level scale of a super-block in NVFP4; the largest value that it multiplies
/// is 448 * 6.
PYCOMM_HD Scale super_scale(float amax) { return symmetric_scale(amax, 448.0f * 6.0f); }

/// Scale of a block: `code` travels. Without an inverse the codes are 0; the residual is all of p
/// if the unit is 0, and p travels as NaN if not.
struct BlockScale {
  uint32_t code;
  float unit;
  float inv;
};
template <typename Small>
PYCOMM_HD BlockScale mx_scale(uint32_t amax, bool ceil) {
  const uint32_t code = scale_code<Small>(amax, ceil);
  return {code, decode_scale(code), inv_scale(code)};
}
/// Returns the first-level scale of a block in a super-block, whose largest magnitude is
/// `super_amax`.
PYCOMM_HD BlockScale nv_scale(uint32_t amax, float super_amax, const Scale& second) {
  Rounded first{0, 0.0f};
  if (second.used) {
    first = round_in_range<Float8E4M3>(bits_float(amax) * (448.0f / super_amax));
  }
  const float unit = first.value * second.unit;
  return {first.code, unit, unit > 0.0f ? 1.0f / unit : 0.0f};
}

// -------------------------------------------------------------------- codes

/// Rounds to nearest; |v| beyond the largest number becomes that number.
template <typename Small>
PYCOMM_HD Rounded round_nearest(float v) {
  const uint32_t magnitude = magnitude_bits(v);
  const uint32_t saturated = magnitude < Small::kLargestBits ? magnitude : Small::kLargestBits;
  return round_in_range<Small>(bits_float(saturated | (float_bits(v) ^ magnitude)));
}

}  // namespace pycomm::codecs::mx
