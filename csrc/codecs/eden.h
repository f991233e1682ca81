// eden: a random rotation makes values normal, and each travels as the nearest of the levels that
// are optimal for the normal distribution. Wire format: docs/wire/eden.md. Everything that
// determines the bits is here and in rotation.h, compiled by gcc, nvcc and NVRTC.
#pragma once
#include "codecs/base/block.h"
#include "codecs/rotation/rotation.h"
#include "core/types.h"

namespace pycomm::codecs::eden {

constexpr int kWireVersion = 2;

struct Format {
  int bits = 2;  ///< 1 to 4
  int size_bits = 10;
  bool mmse = false;  ///< the scale with the least error; else the unbiased one
};

PYCOMM_HD size_t num_rotations(const Format& f, size_t numel) {
  return (numel + (size_t{1} << f.size_bits) - 1) >> f.size_bits;
}
PYCOMM_HD size_t scale_bytes(const Format& f, size_t numel) { return num_rotations(f, numel) * 4; }
/// The payload is the header, the scales, then the codes of whole rotations.
PYCOMM_HD size_t codes_offset(const Format& f, size_t numel) {
  return numel == 0 ? 0 : sizeof(RotationHeader) + scale_bytes(f, numel);
}
/// Bytes of the codes of one rotation.
PYCOMM_HD size_t code_bytes(const Format& f) {
  return (static_cast<size_t>(f.bits) << f.size_bits) / 8;
}
PYCOMM_HD size_t encoded_bytes(const Format& f, size_t numel) {
  return codes_offset(f, numel) + padded(num_rotations(f, numel) * code_bytes(f));
}

/// Magnitudes of the Lloyd-Max levels of N(0, 1) for 1 to 4 bits, ascending.
PYCOMM_HD constexpr float level(int bits, int place) {
  constexpr float kLevels[4][8] = {{0.7978846f},
                                   {0.45278f, 1.5104176f},
                                   {0.2450942f, 0.7560053f, 1.3439093f, 2.1519457f},
                                   {0.128395f, 0.3880483f, 0.6567591f, 0.9423405f, 1.2562312f,
                                    1.6180464f, 2.0690172f, 2.7325896f}};
  return kLevels[bits - 1][place];
}
/// From it on a magnitude is nearer to level `place` + 1.
PYCOMM_HD constexpr float border(int bits, int place) {
  constexpr float kBorders[4][8] = {
      {},
      {0.9815988f},
      {0.5005497f, 1.0499573f, 1.7479275f},
      {0.2582217f, 0.5224037f, 0.7995498f, 1.0992858f, 1.4371388f, 1.8435318f, 2.4008034f},
  };
  return kBorders[bits - 1][place];
}
PYCOMM_HD constexpr int num_levels(int bits) { return 1 << (bits - 1); }

/// A code is the place of its level and, on top, the sign.
struct Coded {
  uint32_t code;
  float value;
};

template <int kBits>
PYCOMM_HD Coded quantize(float u, float inv) {
  const float magnitude = bits_float(magnitude_bits(u * inv));
  const uint32_t sign = float_bits(u) >> 31;
  uint32_t code = 0;
  float value = level(kBits, 0);
  for (int i = 0; i < num_levels(kBits) - 1; i++) {
    const bool beyond = magnitude >= border(kBits, i);
    code += beyond ? 1 : 0;
    value = beyond ? level(kBits, i + 1) : value;
  }
  return {code | sign << (kBits - 1), bits_float(float_bits(value) | sign << 31)};
}

/// Decodes the lowest kBits bits of `code`; the others may be anything.
template <int kBits>
PYCOMM_HD float dequantize(uint32_t code) {
  const uint32_t place = code & ((1u << (kBits - 1)) - 1);
  float value = level(kBits, 0);
  for (int i = 0; i < num_levels(kBits) - 1; i++) {
    value = place > static_cast<uint32_t>(i) ? level(kBits, i + 1) : value;
  }
  return bits_float(float_bits(value) | (code >> (kBits - 1) & 1) << 31);
}

/// Power of two by which a rotation is scaled until its largest magnitude is in [1, 2): its squares
/// are far from the ends of float32.
PYCOMM_HD float exponent_of(float amax) { return bits_float(float_bits(amax) & kInfBits); }
PYCOMM_HD float inverse_exponent(float exponent) {
  return bits_float((254u << 23) - float_bits(exponent));
}

}  // namespace pycomm::codecs::eden
