// sign: one bit per value, and a scale per block, its mean magnitude. Wire format:
// docs/wire/sign.md. Everything that determines the bits is here and in block.h, compiled by gcc,
// nvcc and NVRTC.
#pragma once
#include "codecs/base/block.h"
#include "codecs/base/params.h"
#include "core/types.h"

namespace pycomm::codecs::sign {

constexpr int kWireVersion = 1;
constexpr uint32_t kDefaultBlock = 1024;

/// The payload is the scales, then the bits.
PYCOMM_HD size_t codes_offset(uint32_t block, size_t numel) { return num_blocks(numel, block) * 4; }
PYCOMM_HD size_t encoded_bytes(uint32_t block, size_t numel) {
  return codes_offset(block, numel) + padded((numel + 7) / 8);
}

/// Returns the scale of a block. `sum` is that of the magnitudes of n values, in the order that
/// docs/wire/sign.md defines. The mean is used where other block codecs use the largest magnitude:
/// it too is not finite if a value is not.
PYCOMM_HD float mean_scale(float sum, size_t n) { return scale(sum / static_cast<float>(n), 1.0f); }

/// Returns the bit of a value of a used block; zeros of both signs are positive.
PYCOMM_HD uint32_t quantize(float p) { return p < 0.0f ? 1u : 0u; }

/// Decodes the lowest bit of `bits`; the others may be anything.
PYCOMM_HD float dequantize(uint32_t bits, float scale) {
  return bits_float(float_bits(scale) ^ bits << 31);
}

/// Returns the place of the only bit of a power of two.
PYCOMM_HD constexpr uint32_t bits_below(uint32_t power) {
  return power > 1 ? 1 + bits_below(power / 2) : 0;
}

/// Returns the rows of a tile: at least a block.
PYCOMM_HD constexpr int tile_rows(int block) {
  return block > kSmall * cuda::kRow ? block / cuda::kRow : kSmall;
}

}  // namespace pycomm::codecs::sign
