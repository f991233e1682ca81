// Conversion of small floats to and from float32, for gcc and nvcc: float16, bfloat16, float8
// e4m3fn and e5m2, float6 e2m3 and e3m2, float4 e2m1.
//
// Branch-free integer and float operations are used, so plain loops over them vectorise, with the
// same bits at every level. Rounding is to nearest, ties to even. Values that are too large become
// Inf, or in e4m3fn, which has none, the largest number, as torch and NVIDIA's instruction cast it.
// NaN stays NaN and keeps its sign.
#pragma once
#ifndef __CUDACC_RTC__
#include <cstring>
#endif

#include "core/types.h"

namespace pycomm {

PYCOMM_HD uint32_t float_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}
PYCOMM_HD float bits_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

/// Meaning of the codes of a small float with the largest exponent.
enum class Last : uint8_t {
  ieee,     ///< Inf and NaN
  one_nan,  ///< numbers, and all ones is NaN (the "fn" of e4m3fn)
  numbers,  ///< numbers alone: there is no Inf and no NaN
};

/// Small float with a sign, `kExponent` bits and `kMantissa` bits.
template <int kExponent, int kMantissa, Last kLast>
struct SmallFloat {
  static constexpr int kBits = 1 + kExponent + kMantissa;
  static constexpr int kShift = 23 - kMantissa;
  static constexpr int kBias = (1 << (kExponent - 1)) - 1;
  static constexpr uint32_t kMagnitude = (1u << (kExponent + kMantissa)) - 1;
  static constexpr uint32_t kSignShift = 31 - kExponent - kMantissa;
  /// Code above that of the largest number.
  static constexpr uint32_t kTop = kLast == Last::ieee      ? ((1u << kExponent) - 1) << kMantissa
                                   : kLast == Last::one_nan ? kMagnitude
                                                            : kMagnitude + 1;
  static constexpr uint32_t kLargest = kTop - 1;
  static constexpr uint32_t kOverflow = kLast == Last::ieee ? kTop : kLargest;
  static constexpr uint32_t kNan = kLast == Last::ieee      ? kTop | (1u << (kMantissa - 1))
                                   : kLast == Last::one_nan ? kTop
                                                            : kLargest;
  /// float32 bits of the smallest normal number, and of the first power of two whose unit in the
  /// last place is our smallest subnormal: adding it rounds a subnormal in the float adder.
  static constexpr uint32_t kSmallestNormal = static_cast<uint32_t>(127 + 1 - kBias) << 23;
  static constexpr uint32_t kRound = static_cast<uint32_t>(127 + 1 - kBias + kShift) << 23;
  /// float32 bits of the largest number, and of the one that kTop would be: that value and all
  /// above overflow.
  static constexpr uint32_t kLargestBits =
      (kLargest << kShift) + (static_cast<uint32_t>(127 - kBias) << 23);
  static constexpr uint32_t kLimit = (kTop << kShift) + (static_cast<uint32_t>(127 - kBias) << 23);

  PYCOMM_HD static float decode(uint32_t code) {
    const uint32_t wide = (code & kMagnitude) << kShift;
    const uint32_t normal = wide + (static_cast<uint32_t>(127 - kBias) << 23);
    const float subnormal = bits_float(wide + kSmallestNormal) - bits_float(kSmallestNormal);
    uint32_t bits = wide < (1u << 23) ? float_bits(subnormal) : normal;
    if (kLast == Last::one_nan) {
      bits = (code & kMagnitude) == kNan ? 0x7fc00000u : bits;
    } else if (kLast == Last::ieee) {
      bits = (code & kMagnitude) >= kTop ? wide | 0x7f800000u : bits;
    }
    return bits_float(bits | (code & (kMagnitude + 1)) << kSignShift);
  }

  /// The same by a product, whose operand may be subnormal: CPUs take long for that.
  PYCOMM_HD static float decode_by_product(uint32_t code) {
    const uint32_t wide = (code & kMagnitude) << kShift;
    const float value = bits_float(wide) * bits_float(static_cast<uint32_t>(254 - kBias) << 23);
    uint32_t bits = float_bits(value);
    if (kLast == Last::one_nan) {
      bits = value > bits_float(kLargestBits) ? 0x7fc00000u : bits;
    } else if (kLast == Last::ieee) {
      bits = value > bits_float(kLargestBits) ? wide | 0x7f800000u : bits;
    }
    return bits_float(bits | (code & (kMagnitude + 1)) << kSignShift);
  }

  PYCOMM_HD static uint32_t encode(float x) {
    const uint32_t bits = float_bits(x);
    const uint32_t magnitude = bits & 0x7fffffffu;
    const uint32_t subnormal = float_bits(bits_float(magnitude) + bits_float(kRound)) - kRound;
    const uint32_t odd = (magnitude >> kShift) & 1;
    const uint32_t normal = (magnitude - (static_cast<uint32_t>(127 - kBias) << 23) +
                             ((1u << (kShift - 1)) - 1) + odd) >>
                            kShift;
    uint32_t code = magnitude < kSmallestNormal ? subnormal : normal;
    // Below kLimit a number may still round up to it.
    code = magnitude >= kLimit || code > kLargest ? kOverflow : code;
    code = magnitude > 0x7f800000u ? kNan : code;
    return code | (bits >> 31) << (kExponent + kMantissa);
  }
};

using Float16 = SmallFloat<5, 10, Last::ieee>;
using Float8E4M3 = SmallFloat<4, 3, Last::one_nan>;
using Float8E5M2 = SmallFloat<5, 2, Last::ieee>;
using Float6E2M3 = SmallFloat<2, 3, Last::numbers>;
using Float6E3M2 = SmallFloat<3, 2, Last::numbers>;
using Float4E2M1 = SmallFloat<2, 1, Last::numbers>;

/// bfloat16 has float32's exponent: decoding is a shift.
struct BFloat16 {
  PYCOMM_HD static float decode(uint32_t code) { return bits_float(code << 16); }
  PYCOMM_HD static uint32_t encode(float x) {
    const uint32_t bits = float_bits(x);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
    return (bits & 0x7fffffffu) > 0x7f800000u ? bits >> 16 | 0x40u : rounded;
  }
};

}  // namespace pycomm
