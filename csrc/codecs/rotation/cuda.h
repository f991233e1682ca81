// Random rotation of eden in CUDA, and the other operations across a tile: the transform, sums by
// halves, the maximum of each rotation. A warp holds a tile of 1024 values in registers; larger
// rotations lie in neighbouring warps, which exchange data in shared memory. Compiled by nvcc and
// NVRTC.
#pragma once
#include "codecs/base/block_cuda.h"
#include "codecs/rotation/rotation.h"

namespace pycomm::codecs {

using Values = cuda::Vector<float>[kTileRows];

/// Vectors of a tile that follow each other in memory before one is left out; see move().
constexpr uint32_t kEighth = 8;
/// Vectors of memory of a block: of all its tiles, and those left out.
constexpr uint32_t kShared = kTileRows * cuda::kThreads / kEighth * (kEighth + 1);
__device__ __forceinline__ cuda::Vector<float>* shared_tiles() {
  __shared__ cuda::Vector<float> tiles[kShared];
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

/// How the tile of a warp lies in its registers. kLanes lanes hold a row of kLanes vectors, a row
/// follows the one before it, and kTileRows of them are a share of the tile.
template <int kLanes>
struct Shares {
  using Tile = cuda::Tile<kTileRows, kLanes>;
  static constexpr uint32_t kRow = kLanes * cuda::kVector;
  static constexpr uint32_t kShare = kTileRows * kRow;

  /// Returns the place in the tile of a lane's first value of a row.
  __device__ static uint32_t place(uint32_t row) {
    return lane_of_warp() / kLanes * kShare + row * kRow + lane_of_warp() % kLanes * cuda::kVector;
  }
  /// Returns the place in its array of the first value of a warp's tile.
  __device__ static size_t first(const Tile& tile) { return tile.index(0) - place(0); }
  /// Returns the vectors from the lane's first row on to another one, in the memory of move().
  __device__ static constexpr uint32_t moved(uint32_t row) {
    static_assert(kEighth % kLanes == 0 || kLanes % kEighth == 0);
    return row * kLanes + row * kLanes / kEighth;
  }
};

/// Lanes of a row while a kernel computes with rotations of 1 << kSizeBits values. Where it knows
/// the size, a share is a rotation, so that few of the steps cross lanes.
template <int kSizeBits>
constexpr int kRowLanes =
    kSizeBits > 0 ? (1 << kSizeBits) / (kTileRows * cuda::kVector) : cuda::kLanes;
template <int kSizeBits>
using SharesOf = Shares<kRowLanes<kSizeBits>>;
/// The other way: a share is the whole tile.
using Rows = Shares<cuda::kLanes>;

/// Where move() has the first row of a lane. The next ones follow at fixed distances, since one
/// vector in nine is unused, so that eight lanes that move at once find eight different sets of
/// banks.
template <typename Shares, typename T>
__device__ __forceinline__ T* moved() {
  const uint32_t vector = Shares::place(0) / cuda::kVector;
  cuda::Vector<float>* const of_warp = shared_tiles() + warp_of_block() * (kShared / cuda::kWarps);
  return reinterpret_cast<T*>(of_warp) + vector + vector / kEighth;
}

/// Moves the values of a tile, or a word for each vector of them, from one way of lying to another.
/// Vectors are written where a lane read last, which no other lane does, so that it need not wait
/// for the others.
template <typename From, typename To, typename T>
__device__ __forceinline__ void move(T (&y)[kTileRows]) {
  constexpr bool kWaits = sizeof(T) != sizeof(cuda::Vector<float>);
  if constexpr (From::kRow != To::kRow) {
    T *const from = moved<From, T>(), *const to = moved<To, T>();
    if (kWaits) __syncwarp();
#pragma unroll
    for (int row = 0; row < kTileRows; row++) from[From::moved(row)] = y[row];
    __syncwarp();
#pragma unroll
    for (int row = 0; row < kTileRows; row++) y[row] = to[To::moved(row)];
    if (kWaits) __syncwarp();
  }
}

/// Calls f(row) for the first row of each block.
template <typename F>
__device__ __forceinline__ void each_first(uint32_t block, F&& f) {
#pragma unroll
  for (int row = 0; row < kTileRows; row++) {
    if (row * cuda::kRow % block == 0) f(row);
  }
}

/// Gives all rows of a block what its first row has.
template <typename T>
__device__ __forceinline__ void share_rows(T (&rows)[kTileRows], uint32_t block) {
#pragma unroll
  for (int step = kTileRows / 2; step > 0; step /= 2) {
    if (step * cuda::kRow >= block) continue;
#pragma unroll
    for (int row = 0; row < kTileRows; row += 2 * step) rows[row + step] = rows[row];
  }
}

/// Computes f(row) once for each block that a lane has values of, from its first row, for all of
/// its rows.
template <int kSizeBits, typename F>
__device__ __forceinline__ void each_block(uint32_t block, float (&of)[kTileRows], const F& f) {
  block = kSizeBits > 0 ? kTile : block;  // all rows of a lane are of one block
  each_first(block, [&](int row) { of[row] = f(row); });
  share_rows(of, block);
}

/// Replaces what each lane has of a row by the largest of the row's block of `block` values.
template <int kSizeBits>
__device__ __forceinline__ void max_of_tile(uint32_t (&top)[kTileRows], uint32_t block) {
  if constexpr (kSizeBits > 0 && kRowLanes<kSizeBits> < cuda::kLanes) {
    for (int row = 1; row < kTileRows; row++) top[0] = max(top[0], top[row]);
    uint32_t one[1] = {top[0]};
    max_of_blocks(one, SharesOf<kSizeBits>::kRow);
    for (uint32_t& each : top) each = one[0];
  } else {
#pragma unroll
    for (int step = kTileRows / 2; step > 0; step /= 2) {
      if (step * cuda::kRow >= block) continue;
#pragma unroll
      for (int row = 0; row < kTileRows; row++) {
        if ((row & step) == 0) top[row] = max(top[row], top[row + step]);
      }
    }
    if (block >= cuda::kRow) {
      each_first(block, [&](int row) { top[row] = max_of_warp(top[row]); });
    } else {
      max_of_blocks(top, block);
    }
#pragma unroll 1
    for (uint32_t step = 1; step * kTile < block; step *= 2) {
      cuda::Vector<float> mine[1]{};
      mine[0].v[0] = bits_float(top[0]);
      show(mine);
      top[0] = max(top[0], float_bits(shown(0, step).v[0]));
    }
    share_rows(top, block);
  }
}

__device__ __forceinline__ void add(cuda::Vector<float>& to, const cuda::Vector<float>& from) {
  for (int k = 0; k < cuda::kVector; k++) to.v[k] = to.v[k] + from.v[k];
}

/// Adds the halves of a row, or of the smaller blocks in it.
template <int kLanes>
__device__ __forceinline__ float sum_of_lanes(cuda::Vector<float> lane, uint32_t block) {
  const auto other = [](float mine, int step) {
    return bits_float(__shfl_xor_sync(~0u, float_bits(mine), step));
  };
  float (&v)[cuda::kVector] = lane.v;
  if (kLanes == cuda::kLanes && block >= cuda::kRow) {
    // A lane adds one in two values after the first step, and one in four after the second.
    const bool low = (lane_of_warp() & 16) == 0, even = (lane_of_warp() & 8) == 0;
    const float a = (low ? v[0] : v[2]) + other(low ? v[2] : v[0], 16);
    const float b = (low ? v[1] : v[3]) + other(low ? v[3] : v[1], 16);
    float sum = (even ? a : b) + other(even ? b : a, 8);
#pragma unroll
    for (int step = 4; step > 0; step /= 2) sum = sum + other(sum, step);
    sum = sum + other(sum, 16);  // of values 0 and 2, or of 1 and 3
    return sum + other(sum, 8);
  }
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) {
    if (step * cuda::kVector >= block) continue;
#pragma unroll
    for (int k = 0; k < cuda::kVector; k++) v[k] = v[k] + other(v[k], step);
  }
  return (v[0] + v[2]) + (v[1] + v[3]);
}

/// Computes the sum of each block, for each row, of the terms f(row): each half of a block is added
/// to the other, first warps, then rows, then lanes, then the values of a lane. Where the size is
/// known, rows are added as soon as they are there, so that fewer are kept.
template <int kSizeBits, typename F>
__device__ __forceinline__ void add_halves(uint32_t block, float (&sum)[kTileRows], const F& f) {
  constexpr int kHalf = kTileRows / 2;
  constexpr bool kAtOnce = kSizeBits > 0;
  Values terms;
#pragma unroll
  for (int row = 0; row < kHalf; row++) {
    terms[row] = f(row);
    terms[row + kHalf] = f(row + kHalf);
    if (kAtOnce) add(terms[row], terms[row + kHalf]);
  }
#pragma unroll 1
  for (uint32_t step = block / kTile / 2; step > 0; step /= 2) {
    show(terms);
#pragma unroll
    for (int row = 0; row < kTileRows; row++) add(terms[row], shown(row, step));
  }
#pragma unroll
  for (int step = kAtOnce ? kHalf / 2 : kHalf; step > 0; step /= 2) {
    if (!kAtOnce && step * cuda::kRow >= block) continue;
#pragma unroll
    for (int row = 0; row < kTileRows; row++) {
      if ((row & step) == 0) add(terms[row], terms[row + step]);
    }
  }
  // From here on only the first row of each block holds values that matter.
  each_block<kSizeBits>(
      block, sum, [&](int row) { return sum_of_lanes<kRowLanes<kSizeBits>>(terms[row], block); });
}

/// A step with one of two values: `sign` is -1 for the lane with the far one, which gets t a - b,
/// and 1 for the near one, which gets a + t b. The product by `sign` is exact, so that the fused
/// operation rounds once, as an addition does.
__device__ __forceinline__ float butterfly(float mine, float theirs, float sign, float t) {
  return fmaf(sign, mine, t * theirs);
}

/// Computes the last two steps, with values of the same lane, whose slopes are 1.
__device__ __forceinline__ void last_steps(Values& y) {
  // No rotation is so small that they have others.
  static_assert(kMinRotation >= 8 * cuda::kVector);
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

/// Runs the steps in their natural order: values half a rotation apart, then a quarter, and so on.
/// `spread`: the first transform, which has slopes and may end early; else all steps, with slopes
/// of 1, by which a product is exact.
template <int kSizeBits>
__device__ __forceinline__ void transform(Values& y, uint32_t rotation_bits, bool spread) {
  constexpr int kLanes = kRowLanes<kSizeBits>;
  const uint32_t size = 1u << rotation_bits;
  const uint32_t last = spread ? size >> spread_bits(rotation_bits) : 1;
  const auto skips = [&](uint32_t apart) { return apart >= size || apart < last; };
  const auto slope_of = [&](uint32_t apart) { return spread ? slope(size, apart) : 1.0f; };
#pragma unroll 1
  for (uint32_t step = size / kTile / 2; step > 0; step /= 2) {
    if (skips(step * kTile)) continue;
    show(y);
    const float t = slope_of(step * kTile);
    const float sign = warp_of_block() & step ? -1.0f : 1.0f;
#pragma unroll
    for (int row = 0; row < kTileRows; row++) {
      const cuda::Vector<float> theirs = shown(row, step);
      for (int k = 0; k < cuda::kVector; k++) {
        y[row].v[k] = butterfly(y[row].v[k], theirs.v[k], sign, t);
      }
    }
  }
  // Rows lie `between` values apart, and the first of these steps takes those `from` rows apart.
  const auto step_rows = [&](uint32_t between, int from) {
#pragma unroll
    for (int step = kTileRows / 2; step > 0; step /= 2) {
      if (step > from || skips(step * between)) continue;
      const float t = slope_of(step * between);
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
  };
  using Shares = SharesOf<kSizeBits>;
  step_rows(Shares::kRow, kTileRows / 2);
  if constexpr (kSizeBits > 0 && kLanes == cuda::kLanes) {
    // All other steps are between rows, too, when the values have moved: a move takes half of an
    // instruction for a value, and a step with another lane one more than between rows.
    using Middle = codecs::Shares<kLanes / kTileRows>;
    using Last = codecs::Shares<1>;
    move<Shares, Middle>(y);
    step_rows(Middle::kRow, kTileRows / 2);
    if (last > Last::kRow) return move<Middle, Shares>(y);
    move<Middle, Last>(y);
    step_rows(Last::kRow, Middle::kRow / Last::kRow / 2);
    last_steps(y);
    return move<Last, Shares>(y);
  }
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) {
    if (skips(step * cuda::kVector)) continue;
    const float t = slope_of(step * cuda::kVector);
    const float sign = lane_of_warp() & step ? -1.0f : 1.0f;
#pragma unroll
    for (int row = 0; row < kTileRows; row++) {
      for (int k = 0; k < cuda::kVector; k++) {
        const uint32_t other = __shfl_xor_sync(~0u, float_bits(y[row].v[k]), step);
        y[row].v[k] = butterfly(y[row].v[k], bits_float(other), sign, t);
      }
    }
  }
  if (last == 1) last_steps(y);
}

/// The two sets of signs of a lane's values, which lie as `Shares` say.
template <typename Shares>
class RotationSigns {
 public:
  uint32_t first, second;

  /// The tile begins at value `place`. Called by all lanes of a warp.
  __device__ __forceinline__ RotationSigns(const RotationHeader& header, size_t place) {
    // Half of the warp computes the words of a set, four at once.
    constexpr uint32_t kHalf = cuda::kLanes / 2;
    const uint64_t number = header.word + place / kSignsPerWord;
    const Random4 four = random_words(header.key, 0, lane_of_warp() < kHalf ? 0 : kSecondTensor,
                                      number / 4 + lane_of_warp() % kHalf);
    auto* const words = static_cast<uint4*>(cuda::row_of_warp());
    __syncwarp();  // all have read the previous contents
    words[lane_of_warp()] = uint4{four.word[0], four.word[1], four.word[2], four.word[3]};
    __syncwarp();
    const uint8_t* const set = reinterpret_cast<const uint8_t*>(words) + number % 4 * 4;
    first = of_lane(set);
    second = of_lane(set + kHalf * sizeof(uint4));
  }

  /// Calls f(row, signs) for each row: bit k + 1 of `signs` is that of value k. So the compiler
  /// takes the four of a row by one instruction, which needs bits of a byte above the first.
  template <typename F>
  __device__ __forceinline__ static void each_row(uint32_t set, const F& f) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      // Unknown, since the compiler would keep each bit from one flip to the next in a predicate.
      const int word =
          cuda::opaque(static_cast<int>(half == 0 ? set : __funnelshift_l(set, set, 32 - 4)));
#pragma unroll
      for (int i = 0; i < 4; i++) f(4 * half + i, static_cast<uint32_t>(word) >> 8 * i);
    }
  }

 private:
  /// Of each row a lane has half a byte of a set. Those of eight rows make a word.
  __device__ __forceinline__ static uint32_t of_lane(const uint8_t* set) {
    static_assert(kTileRows == 8);
    const uint8_t* const bytes = set + Shares::place(0) / 8;
    uint32_t four[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const auto byte = [&](int i) -> uint32_t { return bytes[(4 * half + i) * Shares::kRow / 8]; };
      four[half] = __byte_perm(__byte_perm(byte(0), byte(1), 0x40),
                               __byte_perm(byte(2), byte(3), 0x40), 0x5410);
    }
    const uint32_t by = lane_of_warp() % 2 * 4;
    const uint32_t word = (four[0] >> by & 0x0f0f0f0fu) | (four[1] << (4 - by) & 0xf0f0f0f0u);
    return __funnelshift_l(word, word, 1);
  }
};

/// Multiplies values by `scale` and flips their signs by a set of `Signs`.
template <typename Signs>
__device__ __forceinline__ void flip(uint32_t set, float scale, Values& y) {
  Signs::each_row(set, [&](int row, uint32_t signs) {
    for (int k = 0; k < cuda::kVector; k++) {
      const float x = y[row].v[k];
      y[row].v[k] = ((signs & 2u << k) != 0 ? -x : x) * scale;
    }
  });
}

/// Bits of a rotation's size: kSizeBits, known to the compiler, which then unrolls all passes; or
/// if that is 0, those of the call. Then passes share their instructions: more copies of them than
/// a multiprocessor's instruction cache holds make warps wait for instructions.
template <int kSizeBits, typename Params>
__device__ __forceinline__ uint32_t size_bits_of(const Params& args) {
  return kSizeBits > 0 ? kSizeBits : args.rotation_bits;
}

template <int kSizeBits>
using SignsOf = RotationSigns<SharesOf<kSizeBits>>;

template <int kSizeBits>
__device__ __forceinline__ void rotate(const SignsOf<kSizeBits>& signs, uint32_t size_bits,
                                       Values& y) {
#pragma unroll(kSizeBits > 0 ? 2 : 1)
  for (int pass = 0; pass < 2; pass++) {
    const bool outer = pass == 0;  // next to the values themselves
    flip<SignsOf<kSizeBits>>(outer ? signs.first : signs.second,
                             outer ? scale_before(size_bits) : 1.0f, y);
    transform<kSizeBits>(y, size_bits, outer);
  }
}

/// The inverse. Between the transforms values are multiplied by `between`.
template <int kSizeBits>
__device__ __forceinline__ void unrotate(const SignsOf<kSizeBits>& signs, uint32_t size_bits,
                                         float between, Values& y) {
#pragma unroll(kSizeBits > 0 ? 2 : 1)
  for (int pass = 0; pass < 2; pass++) {
    const bool outer = pass == 1;
    transform<kSizeBits>(y, size_bits, outer);
    flip<SignsOf<kSizeBits>>(outer ? signs.first : signs.second,
                             outer ? scale_after(size_bits) : between, y);
  }
}

// ------------------------------------------------- how the kernels begin and end

/// Loads the values of a tile, and adds the residual if there is one.
template <typename Tile>
__device__ __forceinline__ void load_sum(const Tile& tile, const EncodeParams& args, bool swapped,
                                         Values& p) {
  tile.load(args.in, p);
  if (args.residual == nullptr) return;
  Values residual;
  each_stored(tile, args, swapped,
              [&](int row, const cuda::Vector<float>& value) { residual[row] = value; });
  if (float_bits(args.decay) != float_bits(1.0f)) {
#pragma unroll
    for (int row = 0; row < kTileRows; row++) {
      for (int k = 0; k < cuda::kVector; k++) residual[row].v[k] = args.decay * residual[row].v[k];
    }
  }
#pragma unroll
  for (int row = 0; row < kTileRows; row++) add(p[row], residual[row]);
}

/// Rotated values below this make a tile plain: all that is computed from them is finite, and so
/// are the values themselves, whose magnitudes are at most 64 / 0.77 times as large (rotation.h).
constexpr float kPlain = 0x1p64f;

/// Stores the new residual of values p after y has travelled.
template <typename Shares>
__device__ __forceinline__ void store_rest(const typename Shares::Tile& tile,
                                           const EncodeParams& args, bool swapped, bool plain,
                                           const Values& p, Values& y) {
  if (plain) {
#pragma unroll
    for (int row = 0; row < kTileRows; row++) {
      for (int k = 0; k < cuda::kVector; k++) y[row].v[k] = p[row].v[k] - y[row].v[k];
    }
  } else {
#pragma unroll
    for (int row = 0; row < kTileRows; row++) {
      const cuda::Vector<float> residual = load_residual(tile, args, row, swapped);
      for (int k = 0; k < cuda::kVector; k++) {
        y[row].v[k] = residual_of(p[row].v[k], y[row].v[k], residual.v[k]);
      }
    }
  }
  store_residual(tile, args, y, swapped, [&](uint8_t* to) {
    move<Shares, Rows>(y);
    store_int8(tile_of<kTileRows>(args), args, y, to);
  });
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

template <typename Tile>
__device__ __forceinline__ void store_values(const Tile& tile, const DecodeParams& args,
                                             Values& y) {
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
