// randomk in CUDA. Wire format: docs/wire/randomk.md. The arithmetic is in randomk.h. Compiled by
// nvcc, or at run time by NVRTC, which takes the kernels only.
#include "codecs/base/block_cuda.h"
#include "codecs/base/kernels_cuda.h"
#include "codecs/randomk.h"

namespace pycomm::codecs::randomk {

// ---------------------------------------------------------------- kernels

/// Stretch of this lane. Beyond the last one there are stretches of no values.
struct Stretch {
  uint64_t number;  ///< from the start of the payload
  size_t begin;
  uint32_t size;
  uint32_t lane;  ///< of `lanes` that share it
  uint32_t lanes;

  __device__ Stretch(const Format& f, size_t numel) {
    const size_t length = stretch_of(f);
    lanes = lanes_of(length);
    lane = threadIdx.x % lanes;
    number = (size_t{blockIdx.x} * cuda::kThreads + threadIdx.x) / lanes;
    begin = number * length;
    const size_t left = begin < numel ? numel - begin : 0;
    size = static_cast<uint32_t>(left < length ? left : length);
  }
};

/// Chooses the block. The word is picked by comparing: an index would put all four into local
/// memory.
__device__ __forceinline__ Choice choose(const Format& f, const Header& header,
                                         const Stretch& stretch) {
  const uint64_t number = header.first + stretch.number;
  const Random4 four = random_words(header.seed, header.step, header.tensor, number / 4);
  uint32_t word = four.word[0];
#pragma unroll
  for (uint32_t k = 1; k < 4; k++) word = number % 4 == k ? four.word[k] : word;
  return choose(f, stretch.size, word);
}

template <bool kFeedback>
__global__ void __launch_bounds__(cuda::kThreads) encode_kernel(const EncodeParams args) {
  const Format f = unpack(args.options);
  const Header header{args.seed, args.group, args.step, args.tensor};
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    // Payloads are aligned to four bytes.
    auto* to = reinterpret_cast<uint32_t*>(args.scales);
    to[0] = static_cast<uint32_t>(header.seed);
    to[1] = static_cast<uint32_t>(header.seed >> 32);
    to[2] = static_cast<uint32_t>(header.first);
    to[3] = static_cast<uint32_t>(header.first >> 32);
    to[4] = header.step;
    to[5] = header.tensor;
  }
  const Stretch stretch(f, args.numel);
  const Choice c = choose(f, header, stretch);
  const float* x = args.in + stretch.begin;
  const float* residual = kFeedback ? args.residual + stretch.begin : nullptr;

  uint32_t top = 0;
#pragma unroll 4
  for (uint32_t i = stretch.lane; i < stretch.size; i += stretch.lanes) {
    top = max(top, magnitude_bits(kFeedback ? x[i] + residual[i] : x[i]));
  }
#pragma unroll
  for (uint32_t step = 1; step < cuda::kLanes; step *= 2) {
    const uint32_t other = __shfl_xor_sync(~0u, top, step);
    if (step < stretch.lanes) top = max(top, other);
  }
  const bool bad = top >= kInfBits;
  const float nan = bits_float(kNanBits);

  float* to = reinterpret_cast<float*>(args.codes) + stretch.number * f.block;
  if (kFeedback) {
    // One lane reads, sends and stores a value, since the residuals may be one array.
    float* new_residual = args.new_residual + stretch.begin;
#pragma unroll 4
    for (uint32_t i = stretch.lane; i < stretch.size; i += stretch.lanes) {
      const float kept = residual[i];
      const float p = x[i] + kept;
      float value = bad ? nan : 0.0f;
      if (i - c.first < c.size) {
        if (!bad) value = scaled(p, c.blocks, f.unbiased);
        to[i - c.first] = value;
      }
      new_residual[i] = residual_of(p, value, kept);
    }
  } else {
    for (uint32_t i = stretch.lane; i < c.size; i += stretch.lanes) {
      to[i] = bad ? nan : scaled(x[c.first + i], c.blocks, f.unbiased);
    }
  }
  // Fills the rest of the slot of a short block.
  for (uint32_t i = c.size + stretch.lane; i < c.slot; i += stretch.lanes) to[i] = bad ? nan : 0.0f;
}

template <bool kAdd>
__global__ void __launch_bounds__(cuda::kThreads) decode_kernel(const DecodeParams args) {
  const Format f = unpack(args.options);
  const Stretch stretch(f, args.numel);
  if (stretch.size == 0) return;
  const auto* word = reinterpret_cast<const uint32_t*>(args.scales);
  const Header header{word[0] | uint64_t{word[1]} << 32, word[2] | uint64_t{word[3]} << 32, word[4],
                      word[5]};
  const Choice c = choose(f, header, stretch);
  const float* from = reinterpret_cast<const float*>(args.codes) + stretch.number * f.block;
  float* out = args.out + stretch.begin;
  const bool bad = magnitude_bits(from[0]) > kInfBits;
  if (kAdd && !bad) {
    out += c.first;
    for (uint32_t i = stretch.lane; i < c.size; i += stretch.lanes) out[i] = out[i] + from[i];
    return;
  }
  const float other = bad ? bits_float(kNanBits) : 0.0f;
#pragma unroll 4
  for (uint32_t i = stretch.lane; i < stretch.size; i += stretch.lanes) {
    out[i] = !bad && i - c.first < c.size ? from[i - c.first] : other;
  }
}

}  // namespace pycomm::codecs::randomk

namespace pycomm::codecs {

PYCOMM_KERNELS(randomk, PYCOMM_KERNEL(randomk::encode_kernel<false>),
               PYCOMM_KERNEL(randomk::encode_kernel<true>),
               PYCOMM_KERNEL(randomk::decode_kernel<false>),
               PYCOMM_KERNEL(randomk::decode_kernel<true>));

}  // namespace pycomm::codecs
