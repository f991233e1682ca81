// Random rotation on the CPU: one block at a time, which stays in the first-level cache.
#pragma once
#include "codecs/base/loops.h"
#include "codecs/rotation/rotation.h"

namespace pycomm::codecs {

/// The signs of `size` values, from the one at `value` of the payload on, of tensor 0 or another.
class Signs {
 public:
  Signs(const RotationHeader& header, size_t value, size_t size, uint32_t tensor);
  /// Returns those of the values from 32 * `place` on, the lowest bit first.
  PYCOMM_INLINE uint32_t operator[](size_t place) const { return words_[skip_ + place]; }

 private:
  alignas(64) uint32_t words_[kMaxRotation / kSignsPerWord + 8];
  size_t skip_;
};

/// Two sets of signs of a rotation.
struct RotationSigns {
  RotationSigns(const RotationHeader& header, size_t value, size_t size)
      : first(header, value, size, 0), second(header, value, size, kSecondTensor) {}
  Signs first, second;
};

/// Rotates x + residual (null: x). The n values are followed by zeros.
void rotate_block(const RotationSigns& signs, const float* x, const float* residual, size_t n,
                  int size_bits, float* y);

/// Inverts the rotation of y.
void unrotate_block(const RotationSigns& signs, float* y, int size_bits);

}  // namespace pycomm::codecs
