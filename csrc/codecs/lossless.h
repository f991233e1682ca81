// lossless: float32, or float32 rounded to bfloat16, with the exponents of a block coded as offsets
// from its largest. Wire format: docs/wire/lossless.md.
#pragma once
#include "codecs/block.h"
#include "core/floats.h"
#include "core/types.h"

namespace pycomm::codecs::lossless {

constexpr int kWireVersion = 1;
constexpr uint32_t kBlock = 256;
/// Bits of an offset: 0 if all exponents of the block are one; 8 if they stand there as they are.
/// With 2 to 7 the largest code says that the exponent follows behind the codes.
constexpr uint32_t kRaw = 8;

/// The sections of fixed size, then the stream: the codes and escaped exponents of each block.
struct Layout {
  size_t high;    ///< a byte per value: sign, upper 7 bits of the mantissa
  size_t low;     ///< float32: 16 bits per value, the rest of the mantissa
  size_t blocks;  ///< two bytes per block: largest exponent, bits of an offset
  size_t stream;
  size_t bytes;  ///< the most that a payload can have

  Layout(size_t numel, bool wide) {
    high = 4;
    low = high + padded(numel);
    blocks = low + padded(wide ? 2 * numel : 0);
    stream = blocks + padded(2 * num_blocks(numel, kBlock));
    bytes = stream + padded(numel);
  }
};

/// The value that travels for p. All NaNs are one.
PYCOMM_HD uint32_t wide_bits(float p) {
  return magnitude_bits(p) > kInfBits ? kNanBits : float_bits(p);
}
PYCOMM_HD uint32_t short_bits(float p) {
  return magnitude_bits(p) > kInfBits ? kNanBits : BFloat16::encode(p) << 16;
}

}  // namespace pycomm::codecs::lossless
