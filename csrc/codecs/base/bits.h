// Packing of codes of 1 to 8 bits to a little-endian bit string and back: code i takes the bits
// i * bits to (i + 1) * bits - 1. pack() and unpack() are compiled once for all codecs: inlined
// into each, they would be half of the codecs' code and of its compilation.
#pragma once
#include "codecs/base/block.h"
#include "codecs/base/loops.h"

namespace pycomm::codecs {

/// Packs n codes, at most kMaxBlock; of each byte the lowest `bits` bits count. `codes` has room
/// for n rounded up to 8, and its room beyond n is overwritten.
void pack(int bits, uint8_t* codes, size_t n, uint8_t* out);

/// Unpacks n codes, at most kMaxBlock, in 0 to 2^bits - 1.
void unpack(int bits, const uint8_t* in, size_t n, uint8_t* codes);

/// Codes of a payload that are written block after block, and packed kMaxBlock at a time: a call
/// for each small block would take longer than the packing.
struct Packer {
  int bits;
  size_t numel;
  uint8_t* out;
  uint8_t* tile;  ///< room for kMaxBlock codes

  /// Returns the place of the codes from `lo` on, where a block begins.
  PYCOMM_INLINE uint8_t* at(size_t lo) const {
    return bits == 8 ? out + lo : tile + lo % kMaxBlock;
  }
  /// Says that the codes before `end`, the end of a block, are written.
  PYCOMM_INLINE void written(size_t end) const {
    if (bits == 8 || (end % kMaxBlock != 0 && end != numel)) return;
    const size_t begin = (end - 1) / kMaxBlock * kMaxBlock;
    pack(bits, tile, end - begin, out + begin * bits / 8);
  }
};

/// The same codes, read block after block.
struct Unpacker {
  int bits;
  size_t numel;
  const uint8_t* in;
  uint8_t* tile;  ///< room for kMaxBlock codes

  /// Returns the codes from `lo` on, where a block begins.
  PYCOMM_INLINE const uint8_t* at(size_t lo) const {
    if (bits == 8) return in + lo;
    if (lo % kMaxBlock == 0) {
      unpack(bits, in + lo * bits / 8, numel - lo < kMaxBlock ? numel - lo : kMaxBlock, tile);
    }
    return tile + lo % kMaxBlock;
  }
};

}  // namespace pycomm::codecs
