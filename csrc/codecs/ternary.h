// ternary: -1, 0 or 1 times a scale that all ranks share, so that contributions add up to integers.
// Wire format: docs/wire/ternary.md. Everything that determines the bits is here and in block.h,
// compiled by gcc, nvcc and NVRTC.
#pragma once
#include "codecs/quant.h"

namespace pycomm::codecs::ternary {

constexpr int kWireVersion = 1;
/// Magnitude from which 127 * scale could overflow.
constexpr float kLimit = 0x1p120f;

struct Format {
  int ranks = 7;          ///< this many contributions fit in a code
  int bits = 4;           ///< of a code: 2 * ranks + 1 integers
  uint32_t block = 2048;  ///< values that share a scale
};

/// The payload is the scales, then the codes.
PYCOMM_HD size_t codes_offset(const Format& f, size_t numel) {
  return num_blocks(numel, f.block) * 4;
}
PYCOMM_HD size_t encoded_bytes(const Format& f, size_t numel) {
  return codes_offset(f, numel) + padded((numel * f.bits + 7) / 8);
}

/// Returns a rank's measure. Ranks agree on a maximum, which must not depend on the order of NaNs.
PYCOMM_HD float measured(float amax) {
  return bits_float(magnitude_bits(amax) < kInfBits ? float_bits(amax) : kInfBits);
}

/// Returns the shared scale, with eight significant bits: each of its multiples up to 65535 is
/// exact. `inv` is the factor of a random number below 2^24.
PYCOMM_HD Scale shared_scale(float amax) {
  if (!(amax < kLimit)) return {bits_float(kNanBits), 0.0f, 0.0f, false};
  if (!(amax > kTiny)) return {0.0f, 0.0f, 0.0f, false};
  const float unit = quant::bfloat16_above(amax);
  return {unit, unit * 0x1p-24f, 0.0f, true};
}

/// Returns a rank's seed: each rank rounds with words of its own, though all have one seed. No
/// value is in these groups.
PYCOMM_HD uint64_t rank_seed(uint64_t seed, uint32_t step, uint32_t tensor, uint32_t rank) {
  const Random4 random = random_words(seed, step, tensor, (uint64_t{1} << 62) + 1 + rank);
  return uint64_t{random.word[1]} << 32 | random.word[0];
}

/// Returns the code of a contribution: away from zero with the probability |p| / scale.
PYCOMM_HD int quantize(float p, const Scale& scale, uint32_t random) {
  const float threshold = static_cast<float>(static_cast<int>(random >> 8)) * scale.inv;
  const int away = bits_float(magnitude_bits(p)) > threshold ? 1 : 0;
  return p < 0.0f ? -away : away;
}

/// Returns the code of a sum of contributions: p is a multiple of the scale, and within the top.
PYCOMM_HD int quantize_sum(float p, const Scale& scale, int top) {
  const float v = p / scale.unit;
  const auto most = static_cast<float>(top);
  const float near = v > -most ? v : -most;  // NaN becomes -top
  return quant::round_nearest(near < most ? near : most);
}

PYCOMM_HD float dequantize(int q, float unit) { return static_cast<float>(q) * unit; }

}  // namespace pycomm::codecs::ternary
