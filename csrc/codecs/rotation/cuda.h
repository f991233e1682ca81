// Random rotation of eden in CUDA, and the other operations across a tile: the transform, sums by
// halves, the maximum of each rotation. A warp holds a tile of 1024 values in registers; larger
// rotations lie in neighbouring warps, which exchange data in shared memory. Compiled by nvcc and
// NVRTC.
#pragma once
#include "codecs/base/block_cuda.h"
#include "codecs/rotation/rotation.h"

namespace pycomm::codecs {

using Tile = cuda::Tile<kTileRows>;
using Values = cuda::Vector<float>[kTileRows];

__device__ __forceinline__ uint32_t lane_of() { return threadIdx.x % cuda::kLanes; }
__device__ __forceinline__ uint32_t warp_of() { return threadIdx.x / cuda::kLanes; }
/// Returns the place of the first value of a warp's tile.
__device__ __forceinline__ size_t first_of(const Tile& tile) {
  return tile.index(0) - lane_of() * cuda::kVector;
}

__device__ __forceinline__ cuda::Vector<float>* shared_tiles() {
  __shared__ cuda::Vector<float> tiles[kTileRows * cuda::kThreads];
  return tiles;
}

/// Stores the values of a warp in memory that the other warps of its block see. All threads of the
/// block call it.
template <int kCount>
__device__ __forceinline__ void show(const cuda::Vector<float> (&mine)[kCount]) {
  __syncthreads();  // all have read the previous contents
#pragma unroll
  for (int i = 0; i < kCount; i++) shared_tiles()[i * cuda::kThreads + threadIdx.x] = mine[i];
  __syncthreads();
}
/// Returns vector i of the warp that is `step` away.
__device__ __forceinline__ cuda::Vector<float> shown(int i, uint32_t step) {
  return shared_tiles()[i * cuda::kThreads + (threadIdx.x ^ step * cuda::kLanes)];
}

/// Computes max_of_blocks(), also for blocks of more than a tile.
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

/// Computes the sum of each block, for each row: each half of a block is added to the other, first
/// warps, then rows, then lanes, then the values of a lane.
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
  // From here on only the first row of each block holds values that matter.
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

/// A step with one of two values: `far` is 1 for the lane with the far one, which gets t a - b, as
/// t a + -b; the near one becomes a + t b.
__device__ __forceinline__ float butterfly(float mine, float theirs, uint32_t far, float t) {
  return t * theirs + signed_by(far, 0, mine);
}

/// Runs the steps in their natural order: values half a rotation apart, then a quarter, and so on.
/// `spread`: the first transform, which has slopes and may end early; else all steps, with slopes
/// of 1, by which a product is exact.
__device__ __forceinline__ void transform(Values& y, uint32_t rotation_bits, bool spread) {
  const uint32_t size = 1u << rotation_bits;
  const uint32_t last = spread ? size >> spread_bits(rotation_bits) : 1;
  const auto skips = [&](uint32_t apart) { return apart >= size || apart < last; };
  const auto slope_of = [&](uint32_t apart) { return spread ? slope(size, apart) : 1.0f; };
#pragma unroll 1
  for (uint32_t step = kMaxRotation / kTile / 2; step > 0; step /= 2) {
    if (skips(step * kTile)) continue;
    show(y);
    const float t = slope_of(step * kTile);
    const uint32_t far = (warp_of() & step) != 0;
#pragma unroll
    for (int row = 0; row < kTileRows; row++) {
      const cuda::Vector<float> theirs = shown(row, step);
      for (int k = 0; k < cuda::kVector; k++) {
        y[row].v[k] = butterfly(y[row].v[k], theirs.v[k], far, t);
      }
    }
  }
#pragma unroll
  for (int step = kTileRows / 2; step > 0; step /= 2) {
    if (skips(step * cuda::kRow)) continue;
    const float t = slope_of(step * cuda::kRow);
#pragma unroll
    for (int row = 0; row < kTileRows; row++) {
      if (row & step) continue;
      for (int k = 0; k < cuda::kVector; k++) {
        const float a = y[row].v[k], b = y[row + step].v[k];
        y[row].v[k] = a + t * b;
        y[row + step].v[k] = t * a - b;
      }
    }
  }
#pragma unroll
  for (int step = cuda::kLanes / 2; step > 0; step /= 2) {
    if (skips(step * cuda::kVector)) continue;
    const float t = slope_of(step * cuda::kVector);
    const uint32_t far = (lane_of() & step) != 0;
#pragma unroll
    for (int row = 0; row < kTileRows; row++) {
      for (int k = 0; k < cuda::kVector; k++) {
        const uint32_t other = __shfl_xor_sync(~0u, float_bits(y[row].v[k]), step);
        y[row].v[k] = butterfly(y[row].v[k], bits_float(other), far, t);
      }
    }
  }
  // No rotation is so small that the last two steps have slopes.
  static_assert(kMinRotation >= 8 * cuda::kVector);
  if (last > 1) return;
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

/// Random bits, one for each of the kTile values from `first` on: their signs, or another `stream`.
class RandomBits {
 public:
  __device__ RandomBits(const RotationHeader& header, size_t first, uint32_t stream = 0) {
    const uint64_t number = header.word + first / kSignsPerWord + lane_of();
    const Random4 four = random_words(header.key, 0, stream, number / 4);
    const uint32_t low = number & 1 ? four.word[1] : four.word[0];
    const uint32_t high = number & 1 ? four.word[3] : four.word[2];
    word_ = number & 2 ? high : low;
  }
  /// Returns four bits, of the values from `place` on, which may differ by lane.
  __device__ uint32_t from(uint32_t place) const {
    return __shfl_sync(~0u, word_, place / kSignsPerWord) >> place % kSignsPerWord;
  }

 private:
  uint32_t word_;
};

/// Two sets of signs of a rotation.
struct RotationSigns {
  __device__ RotationSigns(const RotationHeader& header, size_t place)
      : first(header, place), second(header, place, kSecondTensor) {}
  RandomBits first, second;
};

__device__ __forceinline__ void flip(const RandomBits& signs, float scale, Values& y) {
#pragma unroll
  for (int row = 0; row < kTileRows; row++) {
    const uint32_t bits = signs.from(row * cuda::kRow + lane_of() * cuda::kVector);
    for (int k = 0; k < cuda::kVector; k++) y[row].v[k] = signed_by(bits, k, y[row].v[k] * scale);
  }
}

/// Transforms of a rotation and, from kBack on, of its inverse, and the end of both.
enum Pass : int { kThere, kBetween, kBack, kAgain, kDone };

/// Runs the passes from `begin` to before `end`. After the rotation, which is the first two, it
/// calls f(), which may replace y by what is to be rotated back.
///
/// kCopies of the instructions: with 1 all passes run the same. Four copies, and the encoder
/// between them, are more than a multiprocessor's instruction cache holds, and warps wait for
/// instructions: with feedback, an encoder takes up to twice as long on an H200. Two alone are 10 %
/// faster than one.
template <int kCopies, typename F>
__device__ __forceinline__ void rotate_tile(const RotationSigns& signs, uint32_t rotation_bits,
                                            Values& y, Pass begin, Pass end, const F& f) {
#pragma unroll kCopies
  for (int pass = begin; pass < end; pass++) {
    const bool outer = pass == kThere || pass == kAgain;  // next to the values themselves
    if (pass != kBack) {
      const float scale = pass == kThere   ? scale_before(rotation_bits)
                          : pass == kAgain ? scale_between(rotation_bits)
                                           : 1.0f;
      flip(pass == kThere ? signs.first : signs.second, scale, y);
    }
    transform(y, rotation_bits, outer);
    if (pass == kBetween) f();
  }
  if (end == kDone) flip(signs.first, scale_after(rotation_bits), y);
}

// ------------------------------------------------- how the kernels begin and end

/// Rotates the values of a tile and calls f(), which encodes y and replaces it by the values that
/// the payload holds. From these it stores the new residual, if there is one. Values and residual
/// are read again for it, from the cache, rather than kept in registers.
template <typename F>
__device__ __forceinline__ void encode_rotated(const Tile& tile, const EncodeParams& args,
                                               const RotationSigns& signs, Values& y, const F& f) {
  tile.load(args.in, y);
  if (args.residual != nullptr) {
#pragma unroll
    for (int row = 0; row < kTileRows; row++) {
      const cuda::Vector<float> residual = load_residual(tile, args, row);
      for (int k = 0; k < cuda::kVector; k++) y[row].v[k] = y[row].v[k] + residual.v[k];
    }
  }
  const bool back = args.residual != nullptr;
  rotate_tile<1>(signs, args.rotation_bits, y, kThere, back ? kDone : kBack, f);
  if (!back) return;
#pragma unroll
  for (int row = 0; row < kTileRows; row++) {
    const cuda::Vector<float> x = tile.load(args.in, row);
    const cuda::Vector<float> residual = load_residual(tile, args, row);
    for (int k = 0; k < cuda::kVector; k++) {
      y[row].v[k] = residual_of(x.v[k] + residual.v[k], y[row].v[k], residual.v[k]);
    }
  }
  store_residual(tile, args, y);
}

/// Returns the header of an encoder, which the first thread of all writes to the payload.
__device__ __forceinline__ RotationHeader write_header(const EncodeParams& args) {
  const RotationHeader header{args.key, args.group / (kSignsPerWord / 4)};
  if (leads(args)) {
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

__device__ __forceinline__ void store_unrotated(const Tile& tile, const DecodeParams& args,
                                                const RotationSigns& signs, Values& y) {
  rotate_tile<2>(signs, args.rotation_bits, y, kBack, kDone, [] {});
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
