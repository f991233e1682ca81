// CUDA code that the kernels of lossless share: their arguments, the layout, and the place of each
// block in the stream. Compiled by nvcc and NVRTC.
#pragma once
#include "codecs/base/warp_cuda.h"
#include "codecs/lossless.h"

namespace pycomm::codecs::lossless {

/// Joins a size in the stream: words of codes in x, bytes of escaped exponents in y. Those of a
/// span fit together in one word.
__device__ __forceinline__ uint32_t joined(uint32_t words, uint32_t escaped) {
  return words | escaped << 16;
}
__device__ __forceinline__ uint2 plus(uint2 a, uint32_t b) {
  return {a.x + (b & 0xffff), a.y + (b >> 16)};
}

/// Places of all sections.
struct Places {
  size_t numel;
  size_t blocks;
  Layout at;
  uint8_t* payload;
  uint32_t* high;  ///< four values in a word
  uint16_t* low;   ///< null: there are none
  uint8_t* heads;
  uint32_t* stream;
  uint2* total;
  uint2* spans;
  uint32_t* exponents;  ///< four values in a word

  __device__ explicit Places(const LosslessParams& args)
      : numel(args.numel),
        blocks(num_blocks(numel, kBlock)),
        at(numel, args.wide != 0),
        payload(args.payload) {
    const Scratch scratch(numel);
    high = reinterpret_cast<uint32_t*>(payload + at.high);
    low = args.wide ? reinterpret_cast<uint16_t*>(payload + at.low) : nullptr;
    heads = payload + at.heads;
    stream = reinterpret_cast<uint32_t*>(payload + at.stream);
    total = reinterpret_cast<uint2*>(args.scratch);
    spans = reinterpret_cast<uint2*>(args.scratch + scratch.spans);
    exponents = reinterpret_cast<uint32_t*>(args.scratch + scratch.exponents);
  }

  /// Returns where the codes end, of which all take `total`.
  __device__ size_t codes_end(uint2 total) const { return at.stream + size_t{4} * total.x; }
  /// Returns the values of a block; 0 beyond the last one.
  __device__ uint32_t size(size_t block) const {
    const size_t left = block < blocks ? numel - block * kBlock : 0;
    return left < kBlock ? static_cast<uint32_t>(left) : kBlock;
  }
  /// Returns the size of a block in the stream, joined.
  __device__ uint32_t taken(size_t block) const {
    if (block >= blocks) return 0;
    const uint8_t* head = heads + block * kHead;
    return joined(code_words(width_of(head[1]), size(block)), head[2]);
  }
};

/// The two blocks of a warp, and the stream sizes before each. Used by all lanes of the warp.
struct Pair {
  size_t block[kBlocks];
  uint2 before[kBlocks];

  __device__ Pair(const Places& in, size_t warp) {
    static_assert(kSpan == cuda::kLanes && kBlocks == 2);
    block[0] = warp * kBlocks;
    block[1] = block[0] + 1;
    const uint32_t place = block[0] % kSpan;
    const uint32_t mine = in.taken(block[0] - place + lane_of_warp());
    const uint32_t of_span = sum_of_warp(lane_of_warp() < place ? mine : 0);
    before[0] = plus(in.spans[block[0] / kSpan], of_span);
    before[1] = plus(before[0], __shfl_sync(kAll, mine, static_cast<int>(place)));
  }
};

// Four bytes in a word, one for each of a lane's values of a row.

constexpr uint32_t kOnes = 0x01010101, kTops = 0x80808080, kRests = 0x7f7f7f7f;

/// Returns byte k of each of four words.
__device__ __forceinline__ uint32_t bytes_of(const uint32_t (&word)[cuda::kVector], uint32_t k) {
  const uint32_t pick = k | (k + 4) << 4;
  return __byte_perm(__byte_perm(word[0], word[1], pick), __byte_perm(word[2], word[3], pick),
                     0x5410);
}
/// Subtracts bytes, modulo 256.
__device__ __forceinline__ uint32_t minus(uint32_t a, uint32_t b) {
  return ((a | kTops) - (b & kRests)) ^ ((a ^ ~b) & kTops);
}
/// Returns the top bit of each byte that is `least` or more, from 1 to 128.
__device__ __forceinline__ uint32_t reaching(uint32_t bytes, uint32_t least) {
  return (((bytes & kRests) + (0x80 - least) * kOnes) | bytes) & kTops;
}
/// Returns ones in the bytes of the values that a block of n has, from `place` on.
__device__ __forceinline__ uint32_t those_there(uint32_t place, uint32_t n) {
  return place + cuda::kVector <= n ? ~0u : place >= n ? 0 : (1u << 8 * (n - place)) - 1;
}

/// Returns the place in its block of the lane's first value of a row.
__device__ __forceinline__ uint32_t place_of(int row) {
  return row * cuda::kRow + lane_of_warp() * cuda::kVector;
}

/// Returns for each row the place of the lane's first marked value, from `rank` on. `marks` has a
/// bit for each value.
__device__ __forceinline__ void rank_marked(const uint32_t (&marks)[kBlockRows], uint32_t rank,
                                            uint32_t (&place)[kBlockRows]) {
  static_assert(kBlockRows == 2);
  const uint32_t mine = __popc(marks[0]) | __popc(marks[1]) << 16;
  const uint32_t up_to = sum_of_lanes_up_to(mine), before = up_to - mine;
  place[0] = rank + (before & 0xffff);
  place[1] = rank + (__shfl_sync(kAll, up_to, cuda::kLanes - 1) & 0xffff) + (before >> 16);
}

}  // namespace pycomm::codecs::lossless
