// lossless in CUDA. Wire format: docs/wire/lossless.md. The arithmetic is in lossless.h. Compiled
// by nvcc, or at run time by NVRTC, which takes the kernels only.
//
// A warp takes two blocks. Encoding writes heads and sections of fixed size, computes from the
// heads the place of each block in the stream (sum_kernel, scan_kernel), and writes the stream.
// Decoding has no first step.
#include "codecs/base/kernels_cuda.h"
#include "codecs/lossless_cuda.h"

namespace pycomm::codecs::lossless {

// --------------------------------------------------------------- encoding

/// Writes the head of a block of n values, whose exponents are a byte each; `top` is the largest of
/// the lane. Called by all lanes of the warp.
__device__ __forceinline__ void write_head(const uint32_t* exponent, uint32_t top, uint32_t n,
                                           uint8_t* head) {
  top = max_of_warp(top);
  // Counts how many offsets are too large for each width: ten bits for each of three.
  constexpr uint32_t kHalf = 3;
  static_assert(kBlockRows == 2);
  const uint32_t offset[kBlockRows] = {(top * kOnes - exponent[0]) & those_there(place_of(0), n),
                                       (top * kOnes - exponent[1]) & those_there(place_of(1), n)};
  uint32_t low = 0, high = 0;
#pragma unroll
  for (uint32_t i = 0; i < 2 * kHalf; i++) {
    const uint32_t largest = largest_code(kNarrow + i);
    const uint32_t count = __popc(reaching(offset[0], largest) | reaching(offset[1], largest) >> 1);
    (i < kHalf ? low : high) += count << 10 * (i % kHalf);
  }
  low = sum_of_warp(low);
  high = sum_of_warp(high);
  const bool all_equal = __ballot_sync(kAll, (offset[0] | offset[1]) != 0) == 0;
  // Each lane has a width; the fewest bytes win, of equal ones the smallest width.
  const uint32_t lane = lane_of_warp();
  const bool chooses = lane >= kNarrow && lane <= kWhole;
  const uint32_t i = chooses ? lane - kNarrow : 0;
  const uint32_t escaped = (i < kHalf ? low >> 10 * i : high >> 10 * (i - kHalf)) & 0x3ff;
  const uint32_t bytes = 4 * code_words(lane, n) + (lane < kWhole ? escaped : 0);
  const uint32_t best = ~max_of_warp(chooses ? ~(bytes << 4 | lane) : 0);
  Choice choice{best & 15, 0};
  choice.escaped = (best >> 4) - 4 * code_words(choice.width, n);
  if (all_equal) choice = {0, 0};
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

  uint32_t exponent[kRows], top[kRows];
  cuda::Vector<uint16_t> low[kRows];
#pragma unroll
  for (int row = 0; row < kRows; row++) {
    uint32_t bits[cuda::kVector];
    top[row] = 0;
#pragma unroll
    for (int k = 0; k < cuda::kVector; k++) {
      bits[k] = value_bits(p[row].v[k], args.wide != 0);
      top[row] = max(top[row], bits[k] & 0x7fffffff);
      low[row].v[k] = static_cast<uint16_t>(bits[k]);
      if (kFeedback) p[row].v[k] = residual_of(p[row].v[k], bits_float(bits[k]), kept[row].v[k]);
    }
    const uint32_t third = bytes_of(bits, 2), last = bytes_of(bits, 3);
    const uint32_t high = (last & kTops) | (third & kRests);
    exponent[row] = (last & kRests) << 1 | (third >> 7 & kOnes);
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
    const uint32_t highest = max(top[b * kBlockRows], top[b * kBlockRows + 1]) >> 23;
    write_head(exponent + b * kBlockRows, highest, to.size(block), to.heads + block * kHead);
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

/// Sets bytes of the payload to zero, one lane after the other.
__device__ __forceinline__ void clear(uint8_t* payload, size_t begin, size_t end) {
  for (size_t i = begin + lane_of_warp(); i < end; i += cuda::kLanes) payload[i] = 0;
}

/// Computes the stream sizes before each span, and the total; encoding, it also clears paddings and
/// writes the header. One block of threads.
__global__ void __launch_bounds__(cuda::kThreads) scan_kernel(const Batch<LosslessParams> batch) {
  const LosslessParams args = tensor_of_block(batch);
  const Places in(args);
  const uint2 total = scan_in_place(in.spans, num_blocks(in.blocks, kSpan));
  if (threadIdx.x == 0) *in.total = total;
  if (args.in == nullptr || warp_of_block() != 0) return;
  const size_t codes_end = in.codes_end(total), used = padded(codes_end + total.y);
  clear(in.payload, in.at.high + args.numel, in.at.low);
  clear(in.payload, in.at.low + (in.low ? 2 * args.numel : 0), in.at.heads);
  clear(in.payload, in.at.heads + kHead * in.blocks, in.at.stream);
  clear(in.payload, codes_end, used - total.y);
  if (lane_of_warp() < 4) {
    reinterpret_cast<uint32_t*>(in.payload)[lane_of_warp()] =
        lane_of_warp() == 0 ? static_cast<uint32_t>(used) : 0;
  }
}

/// Writes the codes of a block, `words` of them; a byte of `code` has one of a lane's values of a
/// row. Called by all lanes of the warp.
__device__ __forceinline__ void write_codes(uint32_t width, const uint32_t (&code)[kBlockRows],
                                            uint32_t words, uint32_t* to) {
  uint32_t chunk[kBlockRows];
#pragma unroll
  for (int row = 0; row < kBlockRows; row++) {
    const uint32_t power = 1u << width;
    const uint32_t pairs = (code[row] & 0xff00ff) + __byte_perm(code[row], 0, 0x4341) * power;
    chunk[row] = (pairs & 0xffff) + (pairs >> 16) * (power * power);
  }
  // Of two lanes one takes the first row, and one the second: the codes of eight neighbours, which
  // are whole bytes. They become words in the memory of the warp.
  const uint32_t lane = lane_of_warp();
  const bool odd = lane % 2 != 0;
  const uint32_t other = __shfl_xor_sync(kAll, odd ? chunk[0] : chunk[1], 1);
  const uint32_t first = odd ? other : chunk[0], second = odd ? chunk[1] : other;
  const uint64_t eight = first | uint64_t{second} << 4 * width;
  auto* const memory = static_cast<uint32_t*>(cuda::row_of_warp());
  auto* const bytes =
      reinterpret_cast<uint8_t*>(memory) + (lane / 2 + (odd ? cuda::kLanes / 2 : 0)) * width;
  __syncwarp();  // all have read the previous contents
#pragma unroll
  for (uint32_t i = 0; i < kWhole; i++) {
    if (i < width) bytes[i] = static_cast<uint8_t>(eight >> 8 * i);
  }
  __syncwarp();
#pragma unroll
  for (uint32_t i = lane; i < kWhole * kBlock / 32; i += cuda::kLanes) {
    if (i < words) to[i] = memory[i];
  }
}

/// Writes the part of the stream of a block of n values. `end` is the end of the stream. Called by
/// all lanes of the warp.
__device__ __forceinline__ void write_block(const uint32_t* exponent, uint32_t n,
                                            const uint8_t* head, uint2 before, uint32_t* stream,
                                            uint8_t* end) {
  const uint32_t top = head[0], width = head[1];
  if (width == 0) return;
  const uint32_t largest = largest_code(width);
  uint32_t marks[kBlockRows], place[kBlockRows], code[kBlockRows];
#pragma unroll
  for (int row = 0; row < kBlockRows; row++) {
    const uint32_t offset = (top * kOnes - exponent[row]) & those_there(place_of(row), n);
    marks[row] = escapes(width) ? reaching(offset, largest) : 0;
    const uint32_t over = (marks[row] >> 7) * 0xff;
    code[row] = (offset & ~over) | (largest * kOnes & over);
  }
  write_codes(width, code, code_words(width, n), stream + before.x);
  if (!escapes(width)) return;
  rank_marked(marks, before.y, place);
#pragma unroll
  for (int row = 0; row < kBlockRows; row++) {
    for (uint32_t left = marks[row]; left != 0; left &= left - 1) {
      const uint32_t lowest = (left & -left) >> 7;  // 1 in its byte
      *(end - 1 - place[row]++) = static_cast<uint8_t>(__dp4a(exponent[row], lowest, 0u));
    }
  }
}

__global__ void __launch_bounds__(cuda::kThreads) pack_kernel(const Batch<LosslessParams> batch) {
  const LosslessParams args = tensor_of_block(batch);
  const Places to(args);
  const uint2 total = *to.total;
  const size_t used = padded(to.codes_end(total) + total.y);
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
  // Unused memory is cleared by all threads together.
  auto* words = reinterpret_cast<uint32_t*>(to.payload);
  const size_t threads = size_t{args.blocks.count} * cuda::kThreads;
  for (size_t i = used / 4 + size_t{block_of(args)} * cuda::kThreads + threadIdx.x;
       i < to.at.bytes / 4; i += threads) {
    words[i] = 0;
  }
}

// --------------------------------------------------------------- decoding

/// Both ends of the stream; beyond them it reads bytes of ones.
struct Ends {
  const uint32_t* words;
  const uint8_t* end;
  uint32_t size;  ///< as the first word of a payload

  __device__ uint32_t word(uint32_t i) const { return i < size / 4 ? words[i] : ~0u; }
  /// Returns the i-th escaped exponent.
  __device__ uint32_t escaped(uint32_t i) const { return i < size ? *(end - 1 - i) : 0xff; }
};

/// Reads the exponents of a block of n values, a byte each. Called by all lanes of the warp.
__device__ __forceinline__ void read_block(const Ends& stream, const uint8_t* head, uint2 before,
                                           uint32_t n, uint32_t* exponent) {
  const uint32_t top = head[0], width = width_of(head[1]);
  const uint32_t largest = largest_code(width), pair = largest * 0x10001;
  uint32_t marks[kBlockRows], place[kBlockRows];
#pragma unroll
  for (int row = 0; row < kBlockRows; row++) {
    const uint32_t i = place_of(row);
    uint32_t chunk = 0;
    if (i < n && width != 0) {
      const uint32_t at = before.x + i * width / 32;
      const uint32_t shift = i * width % 32;
      chunk = stream.word(at) >> shift;
      if (shift + cuda::kVector * width > 32) chunk |= stream.word(at + 1) << (32 - shift);
    }
    const uint32_t pairs = (chunk & ((1u << 2 * width) - 1)) | chunk >> 2 * width << 16;
    const uint32_t code = (pairs & pair) | (pairs >> width & pair) << 8;
    exponent[row] = minus(top * kOnes, code);
    marks[row] = ~((code ^ largest * kOnes) + kRests) & kTops & those_there(i, n);
  }
  if (!escapes(width)) return;
  rank_marked(marks, before.y, place);
#pragma unroll
  for (int row = 0; row < kBlockRows; row++) {
    for (uint32_t left = marks[row]; left != 0; left &= left - 1) {
      const uint32_t lowest = (left & -left) >> 7;  // 1 in its byte
      exponent[row] = (exponent[row] & ~(lowest * 0xff)) | lowest * stream.escaped(place[row]++);
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
  const Ends stream{in.stream, in.payload + end, static_cast<uint32_t>(end - in.at.stream)};
#pragma unroll
  for (int b = 0; b < kBlocks; b++) {
    if (pair.block[b] >= in.blocks) break;
    uint32_t exponent[kBlockRows];
    read_block(stream, in.heads + pair.block[b] * kHead, pair.before[b], in.size(pair.block[b]),
               exponent);
#pragma unroll
    for (int r = 0; r < kBlockRows; r++) {
      const int row = b * kBlockRows + r;
      const uint32_t last = (high[row] & kTops) | (exponent[r] >> 1 & kRests);
      const uint32_t third = (exponent[r] & kOnes) << 7 | (high[row] & kRests);
      const uint32_t halves[2] = {__byte_perm(third, last, 0x5140),
                                  __byte_perm(third, last, 0x7362)};
#pragma unroll
      for (int k = 0; k < cuda::kVector; k++) {
        const uint32_t half = k % 2 == 0 ? halves[k / 2] << 16 : halves[k / 2] & 0xffff0000;
        const float decoded = bits_float(half | low[row].v[k]);
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
