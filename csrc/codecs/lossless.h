// lossless: float32, or float32 rounded to bfloat16, with the exponents of a block coded as offsets
// from its largest. Wire format: docs/wire/lossless.md. Compiled by gcc, nvcc and NVRTC.
#pragma once
#include "codecs/base/block.h"
#include "codecs/base/params.h"
#include "core/floats.h"
#include "core/types.h"

namespace pycomm::codecs::lossless {

constexpr int kWireVersion = 2;
constexpr uint32_t kBlock = 256;
/// Values of a group, whose codes are whole words.
constexpr uint32_t kGroup = 32;
/// Bits of a code that holds every offset. With kNarrow bits and more, below this width, the
/// largest code marks an exponent that is among the escaped ones.
constexpr uint32_t kWhole = 8;
constexpr uint32_t kNarrow = 2;
/// Bytes of a block's head: its largest exponent, the bits of a code, how many exponents are
/// escaped.
constexpr size_t kHead = 3;

PYCOMM_HD size_t padded16(size_t bytes) { return (bytes + 15) / 16 * 16; }

/// Places of the sections of fixed size, then the stream: codes from its start on, escaped
/// exponents from its end back. All begin at multiples of 16.
struct Layout {
  size_t high;  ///< a byte per value: sign, upper 7 bits of the mantissa
  size_t low;   ///< float32: 16 bits per value, the rest of the mantissa
  size_t heads;
  size_t stream;
  size_t bytes;  ///< the most that a payload can have

  PYCOMM_HD Layout(size_t numel, bool wide) {
    high = 16;
    low = high + padded16(numel);
    heads = low + padded16(wide ? 2 * numel : 0);
    stream = heads + padded16(kHead * num_blocks(numel, kBlock));
    bytes = stream + num_blocks(numel, kGroup) * kGroup;
  }

  /// Returns the end of the stream, from the first word of a payload, which may be wrong.
  PYCOMM_HD size_t end(uint32_t used) const {
    const size_t whole = used / 4 * 4;
    return whole < stream ? stream : whole < bytes ? whole : bytes;
  }
};

/// Returns the value that travels for p. All NaNs are one.
PYCOMM_HD uint32_t value_bits(float p, bool wide) {
  const uint32_t bits = wide ? float_bits(p) : BFloat16::encode(p) << 16;
  return magnitude_bits(p) > kInfBits ? kNanBits : bits;
}

/// Returns sign and upper mantissa in a byte; the next function is the inverse.
PYCOMM_HD uint32_t high_of(uint32_t bits) { return (bits >> 24 & 0x80) | (bits >> 16 & 0x7f); }
PYCOMM_HD float value_of(uint32_t high, uint32_t exponent, uint32_t low) {
  return bits_float((high & 0x80) << 24 | exponent << 23 | (high & 0x7f) << 16 | low);
}

/// Returns the width in a head.
PYCOMM_HD uint32_t width_of(uint32_t byte) { return byte == 1 || byte > kWhole ? kWhole : byte; }
/// Returns the largest code, an offset from which on exponents are escaped if escapes().
PYCOMM_HD uint32_t largest_code(uint32_t width) { return (1u << width) - 1; }
PYCOMM_HD bool escapes(uint32_t width) { return width >= kNarrow && width < kWhole; }
/// Returns the words of the codes of a block of n values.
PYCOMM_HD uint32_t code_words(uint32_t width, size_t n) {
  return width * static_cast<uint32_t>(num_blocks(n, kGroup));
}

/// Width of a block's codes and number of its escaped exponents, which follow from its offsets.
struct Choice {
  uint32_t width;
  uint32_t escaped;
};

/// Chooses the width that takes the fewest bytes, the smallest of equals. `escaped(width)` is how
/// many offsets of the block are largest_code(width) or more.
template <typename F>
PYCOMM_HD Choice choose(size_t n, bool all_equal, F&& escaped) {
  if (all_equal) return {0, 0};
  Choice best{kWhole, 0};
  uint32_t least = 4 * code_words(kWhole, n);
  for (uint32_t width = kWhole - 1; width >= kNarrow; width--) {
    const uint32_t bytes = 4 * code_words(width, n) + escaped(width);
    if (bytes <= least) {
      least = bytes;
      best = {width, escaped(width)};
    }
  }
  return best;
}

// Working data of the CUDA kernels beside the payload.

/// Blocks whose places are computed together: one for each lane of a warp.
constexpr uint32_t kSpan = 32;

/// Layout of the scratch memory. A block's size in the stream is two numbers: words of codes, then
/// bytes of escaped exponents. The memory has them for all blocks, then for those before each span;
/// then come the exponents of all values, a byte each.
struct Scratch {
  size_t spans;
  size_t exponents;
  size_t bytes;

  PYCOMM_HD explicit Scratch(size_t numel) {
    spans = 16;
    exponents = spans + padded16(8 * num_blocks(num_blocks(numel, kBlock), kSpan));
    bytes = exponents + padded16(numel);
  }
};

/// Arguments of every kernel.
struct LosslessParams : StagedParams {
  uint32_t wide;  ///< 1: float32, 0: bfloat16
};

constexpr int kBlockRows = kBlock / cuda::kRow;
constexpr int kBlocks = 2;  ///< of a warp
constexpr int kRows = kBlocks * kBlockRows;

}  // namespace pycomm::codecs::lossless
