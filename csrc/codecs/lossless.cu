// lossless in CUDA. Wire format: docs/wire/lossless.md. The arithmetic is in lossless.h. Compiled
// by nvcc, or at run time by NVRTC, which takes the kernels only.
//
// A warp takes two blocks. Encoding writes heads and sections of fixed size, computes from the
// heads the place of each block in the stream (sum_kernel, scan_kernel), and writes the stream.
// Decoding has no first step.
#include "codecs/base/bits_cuda.h"
#include "codecs/base/kernels_cuda.h"
#include "codecs/lossless_cuda.h"

namespace pycomm::codecs::lossless {

// --------------------------------------------------------------- encoding

/// Writes the head of a block of n values, whose exponents are a byte each. Called by all lanes of
/// the warp.
__device__ __forceinline__ void write_head(const uint32_t* exponent, size_t n, uint8_t* head) {
  uint32_t top = 0;
#pragma unroll
  for (int row = 0; row < kBlockRows; row++) {
    for (int k = 0; k < cuda::kVector; k++) top = max(top, byte_of(exponent[row], k));
  }
#pragma unroll
  for (int lane = 1; lane < cuda::kLanes; lane *= 2) {
    top = max(top, __shfl_xor_sync(kAll, top, lane));
  }
  // Counts how many offsets are too large for each width: ten bits for each of three.
  constexpr uint32_t kHalf = 3;
  uint32_t low = 0, high = 0, any = 0;
#pragma unroll
  for (int row = 0; row < kBlockRows; row++) {
#pragma unroll
    for (int k = 0; k < cuda::kVector; k++) {
      const uint32_t offset = place_of(row) + k < n ? top - byte_of(exponent[row], k) : 0;
      any |= offset;
#pragma unroll
      for (uint32_t i = 0; i < kHalf; i++) {
        low += static_cast<uint32_t>(offset >= largest_code(kNarrow + i)) << 10 * i;
        high += static_cast<uint32_t>(offset >= largest_code(kNarrow + kHalf + i)) << 10 * i;
      }
    }
  }
  low = sum_of_warp(low);
  high = sum_of_warp(high);
  const bool all_equal = __ballot_sync(kAll, any != 0) == 0;
  const Choice choice = choose(n, all_equal, [&](uint32_t width) {
    const uint32_t i = width - kNarrow;
    return (i < kHalf ? low >> 10 * i : high >> 10 * (i - kHalf)) & 0x3ff;
  });
  const uint32_t lane = lane_of_warp();
  const uint32_t byte = lane == 0 ? top : lane == 1 ? choice.width : choice.escaped;
  if (lane < kHead) head[lane] = static_cast<uint8_t>(byte);
}

template <bool kFeedback>
__global__ void __launch_bounds__(cuda::kThreads) head_kernel(const Batch<LosslessParams> batch) {
  const LosslessParams args = tensor_of_block(batch);
  const Places to(args);
  const cuda::Tile<kRows> tile(block_of(args), args.numel, args.in, args.residual,
                               args.new_residual, to.low);
  if (tile.empty()) return;

  cuda::Vector<float> p[kRows], kept[kRows];
  tile.load(args.in, p);
  if (kFeedback) {
    tile.load(args.residual, kept);
    for (int row = 0; row < kRows; row++) {
      for (int k = 0; k < cuda::kVector; k++) p[row].v[k] = p[row].v[k] + kept[row].v[k];
    }
  }

  uint32_t exponent[kRows];
  cuda::Vector<uint16_t> low[kRows];
#pragma unroll
  for (int row = 0; row < kRows; row++) {
    uint32_t high = 0;
    exponent[row] = 0;
#pragma unroll
    for (int k = 0; k < cuda::kVector; k++) {
      const uint32_t bits = value_bits(p[row].v[k], args.wide != 0);
      high |= high_of(bits) << 8 * k;
      exponent[row] |= (bits >> 23 & 0xff) << 8 * k;
      low[row].v[k] = static_cast<uint16_t>(bits);
      if (kFeedback) p[row].v[k] = residual_of(p[row].v[k], bits_float(bits), kept[row].v[k]);
    }
    const size_t i = tile.index(row);
    if (i < args.numel) {
      to.high[i / cuda::kVector] = high;
      to.exponents[i / cuda::kVector] = exponent[row];
    }
  }
  if (kFeedback) tile.store(args.new_residual, args.numel, p);
  if (to.low) tile.store(to.low, args.numel, low);

#pragma unroll
  for (int b = 0; b < kBlocks; b++) {
    const size_t block = warp_of(args) * kBlocks + b;
    if (block >= to.blocks) return;
    write_head(exponent + b * kBlockRows, to.size(block), to.heads + block * kHead);
  }
}

/// Sums the stream sizes of the blocks of each span.
__global__ void __launch_bounds__(cuda::kThreads) sum_kernel(const Batch<LosslessParams> batch) {
  const LosslessParams args = tensor_of_block(batch);
  const Places in(args);
  const size_t span = warp_of(args);
  const uint32_t sum = sum_of_warp(in.taken(span * kSpan + lane_of_warp()));
  if (span * kSpan < in.blocks && lane_of_warp() == 0) in.spans[span] = plus({0, 0}, sum);
}

/// Computes the stream sizes before each span, and the total. One block of threads.
__global__ void __launch_bounds__(cuda::kThreads) scan_kernel(const Batch<LosslessParams> batch) {
  const LosslessParams args = tensor_of_block(batch);
  const Places in(args);
  const uint2 total = scan_in_place(in.spans, num_blocks(in.blocks, kSpan));
  if (threadIdx.x == 0) *in.total = total;
}

/// Writes the part of the stream of a block of n values. `end` is the end of the stream. Called by
/// all lanes of the warp.
__device__ __forceinline__ void write_block(const uint32_t* exponent, size_t n, const uint8_t* head,
                                            uint2 before, uint32_t* stream, uint8_t* end) {
  const uint32_t top = head[0], width = head[1];
  if (width == 0) return;
  const uint32_t largest = largest_code(width);
  auto* codes = reinterpret_cast<uint8_t*>(stream + before.x);
  uint32_t rank = before.y;
#pragma unroll
  for (int row = 0; row < kBlockRows; row++) {
    uint32_t chunk = 0, marks = 0;
#pragma unroll
    for (int k = 0; k < cuda::kVector; k++) {
      const uint32_t offset = place_of(row) + k < n ? top - byte_of(exponent[row], k) : 0;
      chunk |= (offset < largest ? offset : largest) << k * width;
      marks |= static_cast<uint32_t>(offset >= largest) << k;
    }
    store_codes(codes, place_of(row), num_blocks(n, kGroup) * kGroup, static_cast<int>(width),
                chunk);
    if (!escapes(width)) continue;
    size_t at = rank_marked(marks, rank);
#pragma unroll
    for (int k = 0; k < cuda::kVector; k++) {
      if ((marks >> k & 1) == 0) continue;
      *(end - 1 - at++) = static_cast<uint8_t>(byte_of(exponent[row], k));
    }
  }
}

/// Sets bytes of the payload to zero, one lane after the other.
__device__ __forceinline__ void clear(uint8_t* payload, size_t begin, size_t end) {
  for (size_t i = begin + lane_of_warp(); i < end; i += cuda::kLanes) payload[i] = 0;
}

__global__ void __launch_bounds__(cuda::kThreads) pack_kernel(const Batch<LosslessParams> batch) {
  const LosslessParams args = tensor_of_block(batch);
  const Places to(args);
  const uint2 total = *to.total;
  const size_t codes_end = to.at.stream + size_t{4} * total.x;
  const size_t used = padded(codes_end + total.y);
  const size_t first = warp_of(args) * kBlocks * kBlock;
  if (first < args.numel) {
    const Pair pair(to, warp_of(args));
#pragma unroll
    for (int b = 0; b < kBlocks; b++) {
      if (pair.block[b] >= to.blocks) break;
      uint32_t exponent[kBlockRows];
#pragma unroll
      for (int row = 0; row < kBlockRows; row++) {
        const size_t i = pair.block[b] * kBlock + place_of(row);
        exponent[row] = i < args.numel ? to.exponents[i / cuda::kVector] : 0;
      }
      write_block(exponent, to.size(pair.block[b]), to.heads + pair.block[b] * kHead,
                  pair.before[b], to.stream, to.payload + used);
    }
  }
  // Unused memory is cleared by all threads together, paddings and the header by the first warp.
  auto* words = reinterpret_cast<uint32_t*>(to.payload);
  const size_t threads = size_t{args.blocks.count} * cuda::kThreads;
  for (size_t i = used / 4 + size_t{block_of(args)} * cuda::kThreads + threadIdx.x;
       i < to.at.bytes / 4; i += threads) {
    words[i] = 0;
  }
  if (warp_of(args) != 0) return;
  clear(to.payload, to.at.high + args.numel, to.at.low);
  clear(to.payload, to.at.low + (to.low ? 2 * args.numel : 0), to.at.heads);
  clear(to.payload, to.at.heads + kHead * to.blocks, to.at.stream);
  clear(to.payload, codes_end, used - total.y);
  if (lane_of_warp() < 4) words[lane_of_warp()] = leads(args) ? static_cast<uint32_t>(used) : 0;
}

// --------------------------------------------------------------- decoding

/// Both ends of the stream; beyond them it reads bytes of ones.
struct Ends {
  const uint32_t* words;
  const uint8_t* end;
  size_t size;

  __device__ uint32_t word(size_t i) const { return i < size / 4 ? words[i] : ~0u; }
  /// Returns the i-th escaped exponent.
  __device__ uint32_t escaped(size_t i) const { return i < size ? *(end - 1 - i) : 0xff; }
};

/// Reads the exponents of a block of n values, a byte each. Called by all lanes of the warp.
__device__ __forceinline__ void read_block(const Ends& stream, const uint8_t* head, uint2 before,
                                           size_t n, uint32_t* exponent) {
  const uint32_t top = head[0], width = width_of(head[1]);
  const uint32_t largest = largest_code(width);
  uint32_t rank = before.y;
#pragma unroll
  for (int row = 0; row < kBlockRows; row++) {
    const uint32_t i = static_cast<uint32_t>(place_of(row));
    uint32_t chunk = 0, marks = 0;
    exponent[row] = 0;
    if (i < n && width != 0) {
      const size_t at = size_t{before.x} + i * width / 32;
      const uint32_t shift = i * width % 32;
      chunk = stream.word(at) >> shift;
      if (shift + cuda::kVector * width > 32) chunk |= stream.word(at + 1) << (32 - shift);
    }
#pragma unroll
    for (int k = 0; k < cuda::kVector; k++) {
      const uint32_t code = chunk >> k * width & largest;
      exponent[row] |= (top - code & 0xff) << 8 * k;
      marks |= static_cast<uint32_t>(code == largest && i + k < n) << k;
    }
    if (!escapes(width)) continue;
    size_t at = rank_marked(marks, rank);
#pragma unroll
    for (int k = 0; k < cuda::kVector; k++) {
      if ((marks >> k & 1) == 0) continue;
      exponent[row] = (exponent[row] & ~(0xffu << 8 * k)) | stream.escaped(at++) << 8 * k;
    }
  }
}

template <bool kAdd>
__global__ void __launch_bounds__(cuda::kThreads) decode_kernel(const Batch<LosslessParams> batch) {
  const LosslessParams args = tensor_of_block(batch);
  const Places in(args);
  const cuda::Tile<kRows> tile(block_of(args), args.numel, args.out, in.low);
  if (tile.empty()) return;

  uint32_t high[kRows];
  cuda::Vector<uint16_t> low[kRows] = {};
  cuda::Vector<float> value[kRows];
#pragma unroll
  for (int row = 0; row < kRows; row++) {
    const size_t i = tile.index(row);
    high[row] = i < args.numel ? in.high[i / cuda::kVector] : 0;
  }
  if (in.low) tile.load(static_cast<const uint16_t*>(in.low), low);
  if (kAdd) tile.load(static_cast<const float*>(args.out), value);

  const Pair pair(in, warp_of(args));
  const size_t end = in.at.end(*reinterpret_cast<const uint32_t*>(in.payload));
  const Ends stream{in.stream, in.payload + end, end - in.at.stream};
#pragma unroll
  for (int b = 0; b < kBlocks; b++) {
    if (pair.block[b] >= in.blocks) break;
    uint32_t exponent[kBlockRows];
    read_block(stream, in.heads + pair.block[b] * kHead, pair.before[b], in.size(pair.block[b]),
               exponent);
#pragma unroll
    for (int r = 0; r < kBlockRows; r++) {
      const int row = b * kBlockRows + r;
#pragma unroll
      for (int k = 0; k < cuda::kVector; k++) {
        const float decoded =
            value_of(byte_of(high[row], k), byte_of(exponent[r], k), low[row].v[k]);
        value[row].v[k] = kAdd ? value[row].v[k] + decoded : decoded;
      }
    }
  }
  tile.store(args.out, args.numel, value);
}

}  // namespace pycomm::codecs::lossless

namespace pycomm::codecs {

PYCOMM_KERNELS(lossless, PYCOMM_KERNEL(lossless::head_kernel<false>),
               PYCOMM_KERNEL(lossless::head_kernel<true>), PYCOMM_KERNEL(lossless::sum_kernel),
               PYCOMM_KERNEL(lossless::scan_kernel), PYCOMM_KERNEL(lossless::pack_kernel),
               PYCOMM_KERNEL(lossless::decode_kernel<false>),
               PYCOMM_KERNEL(lossless::decode_kernel<true>));

}  // namespace pycomm::codecs
