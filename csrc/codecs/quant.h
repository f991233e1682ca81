// quant: block-wise integers of 2 to 8 bits. Wire format: docs/wire/quant.md. What determines the
// bits is here and in block.h, compiled by gcc, nvcc and NVRTC; kernels round by round_row() of
// quant.cu, which does the same in floats, so change both.
#pragma once
#include "codecs/base/block.h"
#include "core/philox.h"
#include "core/types.h"

namespace pycomm::codecs::quant {

constexpr int kWireVersion = 2;

struct Format {
  int bits = 8;  ///< 2 to 8
  uint32_t block = 256;
  bool random = false;  ///< rounds by chance; else to nearest
};

/// Returns the largest code: 127 for 8 bits, 1 for 2 bits.
PYCOMM_HD constexpr int top(int bits) { return (1 << (bits - 1)) - 1; }

/// The payload is the scales, one for each block, then the codes.
PYCOMM_HD size_t codes_offset(const Format& f, size_t numel) {
  return num_blocks(numel, f.block) * sizeof(float);
}
PYCOMM_HD size_t encoded_bytes(const Format& f, size_t numel) {
  return codes_offset(f, numel) + padded((numel * f.bits + 7) / 8);
}

// -------------------------------------------------------------------- codes

// The code of v = p * inv is round_nearest(v). No finite p gets beyond the top, since v is at most
// top * (1 + 2^-22).

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

PYCOMM_HD float dequantize(int q, float unit) { return static_cast<float>(q) * unit; }

/// Returns a code of 4 bits: in a byte, the value with the even index is the low nibble.
PYCOMM_HD int unpack4(uint32_t nibble) { return static_cast<int>((nibble & 15u) ^ 8u) - 8; }

}  // namespace pycomm::codecs::quant
