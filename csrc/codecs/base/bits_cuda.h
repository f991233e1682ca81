// Packing of codes of 1 to 8 bits to a little-endian bit string in CUDA, four codes to a lane.
// Compiled by nvcc and NVRTC.
#pragma once
#include "core/cuda_vector.h"
#include "core/types.h"

namespace pycomm::codecs {

/// Stores codes of one bit: eight neighbouring lanes have those of 32 values, one word. `chunk`
/// holds the four of the lane's values from i on.
__device__ __forceinline__ void store_bits(uint8_t* codes, size_t i, size_t numel, uint32_t chunk) {
  uint32_t word = chunk << i % 32;
#pragma unroll
  for (int step = 1; step < 32 / cuda::kVector; step *= 2) {
    word |= __shfl_xor_sync(~0u, word, step);
  }
  if (i % 32 == 0 && i < numel) reinterpret_cast<uint32_t*>(codes)[i / 32] = word;
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
