// Random rotation of eden: signs and a transform, twice. Wire format: docs/wire/eden.md. Everything
// that determines the bits is here, compiled by gcc, nvcc and NVRTC.
#pragma once
#include "core/cuda_shape.h"
#include "core/floats.h"
#include "core/philox.h"
#include "core/types.h"

namespace pycomm::codecs {

/// Values of one rotation: a power of two.
constexpr uint32_t kMinRotation = 32;
constexpr uint32_t kMaxRotation = 4096;
constexpr uint32_t kSignsPerWord = 32;
/// Rows and values of a warp's tile in CUDA. Each lane has one word of signs of it.
constexpr int kTileRows = 8;
constexpr uint32_t kTile = kTileRows * cuda::kRow;
static_assert(kTile == cuda::kLanes * kSignsPerWord);

/// Returns the number of values that are rotated: zeros fill the last rotation.
PYCOMM_HD size_t rotated_values(size_t numel, uint32_t rotation_bits) {
  return (numel + (size_t{1} << rotation_bits) - 1) >> rotation_bits << rotation_bits;
}

/// Header of a payload: all that its decoder has to know of the signs.
struct RotationHeader {
  uint64_t key;   ///< seed of the signs
  uint64_t word;  ///< number of the first word of signs
};

/// Derives the key of the signs from the group 2^62, in which a tensor has no value.
PYCOMM_HD uint64_t rotation_key(uint64_t seed, uint32_t step, uint32_t tensor) {
  const Random4 random = random_words(seed, step, tensor, uint64_t{1} << 62);
  return uint64_t{random.word[1]} << 32 | random.word[0];
}

/// Tensor number for the words of the second signs; the first signs use tensor 0 and step 0.
constexpr uint32_t kSecondTensor = 2;

/// Steps of the first transform, which spreads each value over this many, at distances of `size` /
/// 2 and less: more would cost as much as the second transform and gain little.
PYCOMM_HD constexpr int spread_bits(int size_bits) { return size_bits < 10 ? size_bits : 6; }
/// Slopes t of its first three steps, which compute a + t b and t a - b from a and b. With t = 1 as
/// in all other steps, one large value would become few different magnitudes, and smaller values
/// beside it would be lost between them.
constexpr float kSlope0 = 0.70710678f;  // sqrt(1 / 2)
constexpr float kSlope1 = 0.8660254f;   // sqrt(3 / 4)
constexpr float kSlope2 = 0.91287093f;  // sqrt(5 / 6)
PYCOMM_HD constexpr float slope(uint32_t size, uint32_t apart) {
  return apart == size / 2   ? kSlope0
         : apart == size / 4 ? kSlope1
         : apart == size / 8 ? kSlope2
                             : 1.0f;
}

/// Scale of the values before the transforms: a power of two. On the way back they are multiplied
/// by another one between the transforms, so that large values stay finite, and by the rest at the
/// end. A step makes squares 1 + t^2 times as large, all steps 77 / 128 * 2^(steps of both
/// transforms).
PYCOMM_HD float scale_before(int size_bits) {
  const int steps = size_bits + spread_bits(size_bits);
  return bits_float(static_cast<uint32_t>(127 - steps / 2) << 23);
}
PYCOMM_HD float scale_between(int size_bits) {
  return bits_float(static_cast<uint32_t>(127 - (size_bits + 1) / 2) << 23);
}
PYCOMM_HD float scale_after(int size_bits) {
  const int steps = size_bits + spread_bits(size_bits),
            left = (steps + 1) / 2 - (size_bits + 1) / 2;
  return 1.6623377f * bits_float(static_cast<uint32_t>(127 - left) << 23);
}

/// Returns x with the sign flipped if bit i of `signs` is 1.
PYCOMM_HD float signed_by(uint32_t signs, uint32_t i, float x) {
  return bits_float(float_bits(x) ^ ((signs >> i) << 31));
}

}  // namespace pycomm::codecs
