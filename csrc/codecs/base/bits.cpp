// Packing of codes, compiled for several x86 levels. Eight codes, a byte each, are one 64-bit word,
// and all words move at once in vectors; eight packed codes are `bits` bytes.
#include "codecs/base/bits.h"

#include <cstring>

#include "codecs/base/block.h"
#include "codecs/base/loops.h"

namespace pycomm::codecs {
namespace {

/// Mask of the lowest `bits` bits of every lane of `lane` bits.
constexpr uint64_t lanes(int bits, int lane) {
  uint64_t mask = 0;
  for (int at = 0; at < 64; at += lane) mask |= ((uint64_t{1} << bits) - 1) << at;
  return mask;
}

/// Joins pairs of lanes, each with kBits bits at its lower end, to lanes of twice the size and
/// bits.
template <int kBits, int kLane>
PYCOMM_INLINE uint64_t join(uint64_t word) {
  constexpr uint64_t kEven = lanes(kBits, 2 * kLane);
  return (word & kEven) | ((word >> (kLane - kBits)) & kEven << kBits);
}
template <int kBits, int kLane>
PYCOMM_INLINE uint64_t split(uint64_t word) {
  constexpr uint64_t kEven = lanes(kBits, 2 * kLane);
  return (word & kEven) | ((word << (kLane - kBits)) & kEven << kLane);
}

template <int kBits>
PYCOMM_INLINE void pack(uint8_t* __restrict codes, size_t n, uint8_t* __restrict out) {
  alignas(64) uint64_t words[kMaxBlock / 8];
  const size_t groups = (n + 7) / 8;
  for (size_t i = n; i < groups * 8; i++) codes[i] = 0;
  for (size_t g = 0; g < groups; g++) {
    uint64_t word;
    std::memcpy(&word, codes + 8 * g, 8);
    words[g] = join<4 * kBits, 32>(join<2 * kBits, 16>(join<kBits, 8>(word)));
  }
  for (size_t g = 0; g < n / 8; g++) std::memcpy(out + g * kBits, words + g, kBits);
  if (n % 8) std::memcpy(out + n / 8 * kBits, words + n / 8, (n % 8 * kBits + 7) / 8);
}

template <int kBits>
PYCOMM_INLINE void unpack(const uint8_t* __restrict in, size_t n, uint8_t* __restrict codes) {
  alignas(64) uint64_t words[kMaxBlock / 8];
  const size_t groups = (n + 7) / 8, bytes = (n * kBits + 7) / 8;
  size_t g = 0;
  // Eight bytes are copied at once while they exist; split() drops those of later groups.
  for (; g * kBits + 8 <= bytes; g++) std::memcpy(words + g, in + g * kBits, 8);
  for (; g < groups; g++) {
    words[g] = 0;
    std::memcpy(words + g, in + g * kBits, bytes - g * kBits < 8 ? bytes - g * kBits : 8);
  }
  for (g = 0; g < groups; g++) {
    const uint64_t word = split<kBits, 8>(split<2 * kBits, 16>(split<4 * kBits, 32>(words[g])));
    std::memcpy(codes + 8 * g, &word, 8);
  }
}

// Codes of four and two bits, of which a byte has a whole number, take half of the time by loops
// over bytes.

template <>
PYCOMM_INLINE void pack<4>(uint8_t* __restrict codes, size_t n, uint8_t* __restrict out) {
  if (n % 2) codes[n] = 0;
  for (size_t i = 0; i < (n + 1) / 2; i++) {
    uint16_t both;
    std::memcpy(&both, codes + 2 * i, 2);
    out[i] = static_cast<uint8_t>((both & 0xf) | (both >> 4 & 0xf0));
  }
}

template <>
PYCOMM_INLINE void unpack<4>(const uint8_t* __restrict in, size_t n, uint8_t* __restrict codes) {
  for (size_t i = 0; i < n / 2; i++) {
    const uint16_t both = static_cast<uint16_t>((in[i] & 0xf) | (in[i] & 0xf0) << 4);
    std::memcpy(codes + 2 * i, &both, 2);
  }
  if (n % 2) codes[n - 1] = in[n / 2] & 0xf;
}

template <>
PYCOMM_INLINE void unpack<2>(const uint8_t* __restrict in, size_t n, uint8_t* __restrict codes) {
  const auto split = [](uint32_t byte) {
    return (byte | byte << 6 | byte << 12 | byte << 18) & 0x03030303u;
  };
  for (size_t i = 0; i < n / 4; i++) {
    const uint32_t four = split(in[i]);
    std::memcpy(codes + 4 * i, &four, 4);
  }
  if (n % 4) {
    const uint32_t four = split(in[n / 4]);
    std::memcpy(codes + n / 4 * 4, &four, n % 4);
  }
}

template <>
PYCOMM_INLINE void pack<8>(uint8_t* __restrict codes, size_t n, uint8_t* __restrict out) {
  std::memcpy(out, codes, n);
}

template <>
PYCOMM_INLINE void unpack<8>(const uint8_t* __restrict in, size_t n, uint8_t* __restrict codes) {
  std::memcpy(codes, in, n);
}

}  // namespace

PYCOMM_SIMD void pack(int bits, uint8_t* codes, size_t n, uint8_t* out) {
  with_bits<8>(bits,
               [&](auto width) __attribute__((always_inline)) { pack<width>(codes, n, out); });
}

PYCOMM_SIMD void unpack(int bits, const uint8_t* in, size_t n, uint8_t* codes) {
  with_bits<8>(bits,
               [&](auto width) __attribute__((always_inline)) { unpack<width>(in, n, codes); });
}

}  // namespace pycomm::codecs
