// The random rotation of rotate and eden: signs, then a Hadamard transform. Wire format:
// docs/wire/rotate.md. Everything that decides a bit is here, compiled by gcc, nvcc and NVRTC.
#pragma once
#include "core/floats.h"
#include "core/philox.h"
#include "core/types.h"

namespace pycomm::codecs {

/// Values of one rotation: a power of two.
constexpr uint32_t kMinRotation = 32;
constexpr uint32_t kMaxRotation = 4096;
constexpr uint32_t kSignsPerWord = 32;

/// So many values are rotated: zeros fill the last rotation.
PYCOMM_HD size_t rotated_values(size_t numel, uint32_t rotation_bits) {
  return (numel + (size_t{1} << rotation_bits) - 1) >> rotation_bits << rotation_bits;
}

/// What a payload begins with: all that its decoder has to know of the signs.
struct RotationHeader {
  uint64_t key;   ///< seed of the signs
  uint64_t word;  ///< number of the first word of signs
};

/// No value is in the group 2^62 of its tensor.
PYCOMM_HD uint64_t rotation_key(uint64_t seed, uint32_t step, uint32_t tensor) {
  const Random4 random = random_words(seed, step, tensor, uint64_t{1} << 62);
  return uint64_t{random.word[1]} << 32 | random.word[0];
}

/// Both are powers of two, and one divided by the size together: before the transform and after
/// the one that undoes it.
PYCOMM_HD float scale_before(int size_bits) {
  return bits_float(static_cast<uint32_t>(127 - size_bits / 2) << 23);
}
PYCOMM_HD float scale_after(int size_bits) {
  return bits_float(static_cast<uint32_t>(127 - (size_bits + 1) / 2) << 23);
}

/// x with the sign flipped if bit i of `signs` is 1.
PYCOMM_HD float signed_by(uint32_t signs, uint32_t i, float x) {
  return bits_float(float_bits(x) ^ ((signs >> i) << 31));
}

}  // namespace pycomm::codecs
