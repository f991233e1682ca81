// The random rotation of rotate and eden in CUDA, and what else goes across a tile: the transform,
// sums by halves, the largest of each block. A warp holds a tile of 1024 values in registers;
// rotations and blocks of more lie in neighbouring warps, which meet in shared memory. Compiled by
// nvcc and NVRTC.
#pragma once
#include "codecs/block_cuda.h"
#include "codecs/rotation.h"

namespace pycomm::codecs {

constexpr int kTileRows = 8;
/// Each lane has one word of signs of its warp's tile.
constexpr uint32_t kTile = kTileRows * cuda::kRow;
static_assert(kTile == cuda::kLanes * kSignsPerWord);

using Tile = cuda::Tile<kTileRows>;
using Values = cuda::Vector<float>[kTileRows];

__device__ __forceinline__ uint32_t lane_of() { return threadIdx.x % cuda::kLanes; }
__device__ __forceinline__ uint32_t warp_of() { return threadIdx.x / cuda::kLanes; }
/// Place of the first value of a warp's tile.
__device__ __forceinline__ size_t first_of(const Tile& tile) {
  return tile.index(0) - lane_of() * cuda::kVector;
}

__device__ __forceinline__ cuda::Vector<float>* shared_tiles() {
  __shared__ cuda::Vector<float> tiles[kTileRows * cuda::kThreads];
  return tiles;
}

/// Puts what a warp holds where the other warps of its block see it. All threads of the block call
/// it.
template <int kCount>
__device__ __forceinline__ void show(const cuda::Vector<float> (&mine)[kCount]) {
  __syncthreads();  // all have read what was there
#pragma unroll
  for (int i = 0; i < kCount; i++) shared_tiles()[i * cuda::kThreads + threadIdx.x] = mine[i];
  __syncthreads();
}
/// What the warp that is `step` away has shown as its vector i.
__device__ __forceinline__ cuda::Vector<float> shown(int i, uint32_t step) {
  return shared_tiles()[i * cuda::kThreads + (threadIdx.x ^ step * cuda::kLanes)];
}

/// max_of_blocks() for blocks of more than a tile, too.
__device__ __forceinline__ void max_of_tile(uint32_t (&top)[kTileRows], uint32_t block) {
  max_of_blocks(top, block);
  for (uint32_t step = 1; step * kTile < block; step *= 2) {
    cuda::Vector<float> mine[1]{};
    mine[0].v[0] = bits_float(top[0]);
    show(mine);
    top[0] = max(top[0], float_bits(shown(0, step).v[0]));
  }
  if (kTile < block) {
#pragma unroll
    for (int row = 1; row < kTileRows; row++) top[row] = top[0];
  }
}

/// The sum of each block, for each row: each half of a block is added to the other, first warps,
/// then rows, then lanes, then the values of a lane.
__device__ __forceinline__ void add_halves(Values& terms, uint32_t block, float (&sum)[kTileRows]) {
#pragma unroll 1
  for (uint32_t step = kMaxRotation / kTile / 2; step > 0; step /= 2) {
    if (step * kTile >= block) continue;
    show(terms);
#pragma unroll
    for (int row = 0; row < kTileRows; row++) {
      const cuda::Vector<float> theirs = shown(row, step);
      for (int k = 0; k < cuda::kVector; k++) terms[row].v[k] = terms[row].v[k] + theirs.v[k];
    }
  }
#pragma unroll
  for (int step = kTileRows / 2; step > 0; step /= 2) {
    if (step * cuda::kRow >= block) continue;
#pragma unroll
    for (int row = 0; row < kTileRows; row++) {
      if (row & step) continue;
      for (int k = 0; k < cuda::kVector; k++) {
        terms[row].v[k] = terms[row].v[k] + terms[row + step].v[k];
      }
    }
  }
  // Only the first row of each block holds what counts from here on.
#pragma unroll
  for (int row = 0; row < kTileRows; row++) {
    sum[row] = 0.0f;
    if (row * cuda::kRow % block != 0) continue;
    cuda::Vector<float>& lane = terms[row];
#pragma unroll
    for (int step = cuda::kLanes / 2; step > 0; step /= 2) {
      if (step * cuda::kVector >= block) continue;
#pragma unroll
      for (int k = 0; k < cuda::kVector; k++) {
        const uint32_t other = __shfl_xor_sync(~0u, float_bits(lane.v[k]), step);
        lane.v[k] = lane.v[k] + bits_float(other);
      }
    }
    sum[row] = (lane.v[0] + lane.v[2]) + (lane.v[1] + lane.v[3]);
  }
#pragma unroll
  for (int step = kTileRows / 2; step > 0; step /= 2) {
    if (step * cuda::kRow >= block) continue;
#pragma unroll
    for (int row = 0; row < kTileRows; row += 2 * step) sum[row + step] = sum[row];
  }
}

/// The transform in its natural order: values half a rotation apart, then a quarter, and so on.
/// Who has the far one of two values gets the difference, as near + -far.
__device__ __forceinline__ void hadamard(Values& y, uint32_t size) {
#pragma unroll 1
  for (uint32_t step = kMaxRotation / kTile / 2; step > 0; step /= 2) {
    if (step * kTile >= size) continue;
    show(y);
    const uint32_t far = (warp_of() & step) != 0;
#pragma unroll
    for (int row = 0; row < kTileRows; row++) {
      const cuda::Vector<float> theirs = shown(row, step);
      for (int k = 0; k < cuda::kVector; k++) {
        y[row].v[k] = theirs.v[k] + signed_by(far, 0, y[row].v[k]);
      }
    }
  }
#pragma unroll
  for (int step = kTileRows / 2; step > 0; step /= 2) {
    if (step * cuda::kRow >= size) continue;
#pragma unroll
    for (int row = 0; row < kTileRows; row++) {
      if (row & step) continue;
      for (int k = 0; k < cuda::kVector; k++) {
        const float a = y[row].v[k], b = y[row + step].v[k];
        y[row].v[k] = a + b;
        y[row + step].v[k] = a - b;
      }
    }
  }
#pragma unroll
  for (int step = cuda::kLanes / 2; step > 0; step /= 2) {
    if (step * cuda::kVector >= size) continue;
    const uint32_t far = (lane_of() & step) != 0;
#pragma unroll
    for (int row = 0; row < kTileRows; row++) {
      for (int k = 0; k < cuda::kVector; k++) {
        const uint32_t other = __shfl_xor_sync(~0u, float_bits(y[row].v[k]), step);
        y[row].v[k] = bits_float(other) + signed_by(far, 0, y[row].v[k]);
      }
    }
  }
#pragma unroll
  for (int row = 0; row < kTileRows; row++) {
    float (&v)[cuda::kVector] = y[row].v;
    const float ac = v[0] + v[2], bd = v[1] + v[3], a_c = v[0] - v[2], b_d = v[1] - v[3];
    v[0] = ac + bd;
    v[1] = ac - bd;
    v[2] = a_c + b_d;
    v[3] = a_c - b_d;
  }
}

/// A random bit for each of the kTile values from `first` on: their signs, or another `stream`.
class RandomBits {
 public:
  __device__ RandomBits(const RotationHeader& header, size_t first, uint32_t stream = 0) {
    const uint64_t number = header.word + first / kSignsPerWord + lane_of();
    const Random4 four = random_words(header.key, 0, stream, number / 4);
    const uint32_t low = number & 1 ? four.word[1] : four.word[0];
    const uint32_t high = number & 1 ? four.word[3] : four.word[2];
    word_ = number & 2 ? high : low;
  }
  /// Four bits, of the values from `place` on, which may differ by lane.
  __device__ uint32_t from(uint32_t place) const {
    return __shfl_sync(~0u, word_, place / kSignsPerWord) >> place % kSignsPerWord;
  }

 private:
  uint32_t word_;
};

__device__ __forceinline__ void flip(const RandomBits& signs, float scale, Values& y) {
#pragma unroll
  for (int row = 0; row < kTileRows; row++) {
    const uint32_t bits = signs.from(row * cuda::kRow + lane_of() * cuda::kVector);
    for (int k = 0; k < cuda::kVector; k++) y[row].v[k] = signed_by(bits, k, y[row].v[k] * scale);
  }
}

// ------------------------------------------------- how the kernels begin and end

__device__ __forceinline__ void load_rotated(const Tile& tile, const EncodeParams& args,
                                             const RandomBits& signs, Values& y) {
  tile.load(args.in, y);
  if (args.residual != nullptr) {
#pragma unroll
    for (int row = 0; row < kTileRows; row++) {
      const cuda::Vector<float> residual = tile.load(args.residual, row);
      for (int k = 0; k < cuda::kVector; k++) y[row].v[k] = y[row].v[k] + residual.v[k];
    }
  }
  flip(signs, scale_before(args.rotation_bits), y);
  hadamard(y, 1u << args.rotation_bits);
}

/// The header of an encoder, which the first thread of all writes to the payload.
__device__ __forceinline__ RotationHeader write_header(const EncodeParams& args) {
  const RotationHeader header{args.key, args.group / (kSignsPerWord / 4)};
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    args.header[0] = static_cast<uint32_t>(header.key);
    args.header[1] = static_cast<uint32_t>(header.key >> 32);
    args.header[2] = static_cast<uint32_t>(header.word);
    args.header[3] = static_cast<uint32_t>(header.word >> 32);
  }
  return header;
}
__device__ __forceinline__ RotationHeader read_header(const DecodeParams& args) {
  const uint32_t* words = args.header;
  return {uint64_t{words[1]} << 32 | words[0], uint64_t{words[3]} << 32 | words[2]};
}

/// `y` is what the payload holds; what is owed for it is new_residual. Values and residual are read
/// again, out of the cache, rather than kept in registers.
__device__ __forceinline__ void store_owed(const Tile& tile, const EncodeParams& args,
                                           const RandomBits& signs, Values& y) {
  hadamard(y, 1u << args.rotation_bits);
  flip(signs, scale_after(args.rotation_bits), y);
#pragma unroll
  for (int row = 0; row < kTileRows; row++) {
    const cuda::Vector<float> x = tile.load(args.in, row);
    const cuda::Vector<float> residual = tile.load(args.residual, row);
    for (int k = 0; k < cuda::kVector; k++) {
      y[row].v[k] = owed(x.v[k] + residual.v[k], y[row].v[k], residual.v[k]);
    }
  }
  tile.store(args.new_residual, args.numel, y);
}

__device__ __forceinline__ void store_unrotated(const Tile& tile, const DecodeParams& args,
                                                const RandomBits& signs, Values& y) {
  hadamard(y, 1u << args.rotation_bits);
  flip(signs, scale_after(args.rotation_bits), y);
  if (args.add) {
#pragma unroll
    for (int row = 0; row < kTileRows; row++) {
      const cuda::Vector<float> out = tile.load(args.out, row);
      for (int k = 0; k < cuda::kVector; k++) y[row].v[k] = out.v[k] + y[row].v[k];
    }
  }
  tile.store(args.out, args.numel, y);
}

}  // namespace pycomm::codecs
