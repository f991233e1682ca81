// Random rotation on the CPU: one block at a time, which stays in the first-level cache.
#pragma once
#include "codecs/base/loops.h"
#include "codecs/rotation/rotation.h"

namespace pycomm::codecs {

/// Random bits, one for each of `size` values, from the one at `value` of the payload on: their
/// signs, or another `stream` of bits.
class Signs {
 public:
  Signs(const RotationHeader& header, size_t value, size_t size, uint32_t stream = 0);
  /// Returns the signs of the values from 32 * `place` on, the lowest bit first.
  PYCOMM_INLINE uint32_t operator[](size_t place) const { return words_[skip_ + place]; }

 private:
  alignas(64) uint32_t words_[kMaxRotation / kSignsPerWord + 8];
  size_t skip_;
};

/// Two sets of signs of a rotation.
struct RotationSigns {
  RotationSigns(const RotationHeader& header, size_t value, size_t size)
      : first(header, value, size), second(header, value, size, kSecondTensor) {}
  Signs first, second;
};

/// Use of the values that a block decodes to.
enum class Then : uint8_t { store, add, store_residual };

struct Sink {
  Then then = Then::store;
  float* out = nullptr;             ///< values, or the new residual
  const float* x = nullptr;         ///< store_residual: p = x + residual
  const float* residual = nullptr;  ///< store_residual
};

/// Rotates x + residual (null: x). The n values are followed by zeros.
void rotate_block(const RotationSigns& signs, const float* x, const float* residual, size_t n,
                  int size_bits, float* y);

/// Inverts the rotation of y, which is overwritten: n values go to the sink.
void unrotate_block(const RotationSigns& signs, float* y, size_t n, int size_bits,
                    const Sink& sink);

}  // namespace pycomm::codecs
