// Packing of codes of 1 to 8 bits to a little-endian bit string and back: code i takes the bits
// i * bits to (i + 1) * bits - 1. pack() and unpack() are compiled once for all codecs: inlined
// into each, they would be half of the codecs' code and of its compilation.
#pragma once
#include <cstddef>
#include <cstdint>

namespace pycomm::codecs {

/// Packs n codes, at most kMaxBlock; of each byte the lowest `bits` bits count. `codes` has room
/// for n rounded up to 8, and its room beyond n is overwritten.
void pack(int bits, uint8_t* codes, size_t n, uint8_t* out);

/// Unpacks n codes, at most kMaxBlock, in 0 to 2^bits - 1.
void unpack(int bits, const uint8_t* in, size_t n, uint8_t* codes);

}  // namespace pycomm::codecs
