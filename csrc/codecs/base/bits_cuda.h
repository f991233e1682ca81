// Packing of codes of 1 to 8 bits to a little-endian bit string in CUDA, four codes to a lane.
// Compiled by nvcc and NVRTC.
#pragma once
#include "core/cuda_vector.h"
#include "core/types.h"

namespace pycomm::codecs {

/// Stores codes of one bit: chunk[row] has the four of a lane's values of the row. Eight
/// neighbouring lanes have those of 32 values of each row, one word: of four rows they exchange
/// halves, then quarters, until each word is in a lane (and once more in another).
template <int kRows, typename Tile>
__device__ __forceinline__ void store_bits(uint8_t* codes, const Tile& tile, size_t numel,
                                           const uint32_t (&chunk)[kRows]) {
  static_assert(kRows % 4 == 0);
  const uint32_t lane = threadIdx.x % cuda::kLanes;
  auto* const words =
      reinterpret_cast<uint32_t*>(codes) + (tile.index(0) - lane * cuda::kVector) / 32;
  const uint32_t there = (tile.left_of_tile(numel) + 31) / 32;
#pragma unroll
  for (int first = 0; first < kRows; first += 4) {
    // Two rows in a word; a lane keeps the rows that the lowest two bits of its number say.
    const uint32_t* const row = chunk + first;
    const bool odd = (lane & 1) != 0, upper = (lane & 2) != 0;
    const uint32_t low = row[0] | row[2] << 16, high = row[1] | row[3] << 16;
    const uint32_t other = __shfl_xor_sync(~0u, odd ? low : high, 1);
    // Eight bits of two rows.
    const uint32_t two = odd ? other | high << 4 : low | other << 4;
    const uint32_t given = __shfl_xor_sync(~0u, upper ? two & 0xff : two >> 16, 2);
    const uint32_t half = upper ? given | (two >> 16) << 8 : (two & 0xff) | given << 8;
    const uint32_t rest = __shfl_xor_sync(~0u, half, 4);
    const uint32_t at = (first + lane % 4) * (cuda::kRow / 32) + lane / 8;
    if ((lane & 4) == 0 && at < there) words[at] = half | rest << 16;
  }
}

/// Loads the codes of one bit of a lane's values of a row into the lowest bits; the others may be
/// anything.
template <typename Tile>
__device__ __forceinline__ uint32_t load_bits(const uint8_t* codes, const Tile& tile, int row) {
  const auto* words = reinterpret_cast<const uint32_t*>(codes) + tile.index(0) / 32;
  return words[row * (cuda::kRow / 32)] >> tile.index(0) % 32;
}

/// Stores codes of more bits: eight neighbouring lanes have the codes of 32 values, `bits` whole
/// words, of which each lane stores one. `chunk` holds the four codes of the lane's values from i
/// on; a word takes parts of up to four chunks. Of 4 and 8 bits a lane stores its own.
__device__ __forceinline__ void store_codes(uint8_t* codes, size_t i, size_t numel, int bits,
                                            uint32_t chunk) {
  if (bits == 4 || bits == 8) {
    const size_t in_word = bits == 4 ? 8 : 4;
    if (i / in_word * in_word >= numel) return;
    if (bits == 8) reinterpret_cast<uint32_t*>(codes)[i / 4] = chunk;
    if (bits == 4) reinterpret_cast<uint16_t*>(codes)[i / 4] = static_cast<uint16_t>(chunk);
    return;
  }
  const int lane = threadIdx.x % cuda::kLanes, word = lane % 8, width = 4 * bits;
  const int first = word * 32 / width;
  uint32_t stored = 0;
#pragma unroll
  for (int part = 0; part < 4; part++) {
    if (part == 3 && width > 16) continue;  // a word then begins in the first of three, or later
    const int from = first + part, shift = from * width - word * 32;
    const uint32_t other = __shfl_sync(~0u, chunk, (lane & ~7) + (from < 8 ? from : 7));
    if (from < 8 && shift < 32) stored |= shift < 0 ? other >> -shift : other << shift;
  }
  const size_t at = i / 32 * bits + word;
  if (word < bits && at * 32 < numel * bits) reinterpret_cast<uint32_t*>(codes)[at] = stored;
}

/// Loads the four codes from value i on, which is one of the values.
__device__ __forceinline__ uint32_t load_codes(const uint8_t* codes, size_t i, size_t numel,
                                               int bits) {
  const auto* words = reinterpret_cast<const uint32_t*>(codes);
  const size_t at = i * bits / 32;
  const int shift = static_cast<int>(i * bits % 32);
  uint32_t chunk = words[at] >> shift;
  if (shift + 4 * bits > 32 && (at + 1) * 32 < numel * bits) chunk |= words[at + 1] << (32 - shift);
  return chunk;
}

}  // namespace pycomm::codecs
