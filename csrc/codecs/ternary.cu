// ternary in CUDA. Wire format: docs/wire/ternary.md. The arithmetic is in ternary.h. Compiled by
// nvcc, or at run time by NVRTC, which takes the kernels only.
#include "codecs/base/bits_cuda.h"
#include "codecs/base/block_cuda.h"
#include "codecs/base/kernels_cuda.h"
#include "codecs/ternary.h"

namespace pycomm::codecs::ternary {

// ---------------------------------------------------------------- kernels

/// Measures blocks; the scales of `args` are the destination of the measures.
template <int kRows>
__global__ void __launch_bounds__(cuda::kThreads) measure_kernel(const EncodeParams args) {
  const cuda::Tile<kRows> tile(args.numel, args.in, args.residual);
  if (tile.empty()) return;
  const uint32_t block = 1u << args.block_bits;

  cuda::Vector<float> p[kRows];
  if (args.residual != nullptr) {
    load_values<true>(tile, args, p);
  } else {
    load_values<false>(tile, args, p);
  }
  uint32_t top[kRows];
  max_of_rows(p, top);
  max_of_blocks(top, block);
#pragma unroll
  for (int row = 0; row < kRows; row++) {
    const size_t i = tile.index(row);
    if (i % block == 0 && i < args.numel) {
      args.scales[i >> args.block_bits] = measured(bits_float(top[row]));
    }
  }
}

/// Encodes values. The seed of `args` is that of the rank; options are the bits of a code.
template <bool kSum, bool kFeedback>
__global__ void __launch_bounds__(cuda::kThreads) encode_kernel(const EncodeParams args) {
  const cuda::Tile<kSmall> tile(args.numel, args.in, args.residual, args.new_residual);
  if (tile.empty()) return;
  const uint32_t block = 1u << args.block_bits;
  const int bits = static_cast<int>(args.options);

  cuda::Vector<float> p[kSmall];
  load_values<kFeedback>(tile, args, p);
#pragma unroll
  for (int row = 0; row < kSmall; row++) {
    const size_t i = tile.index(row);
    const Scale s = shared_scale(i < args.numel ? args.amax[i >> args.block_bits] : 0.0f);
    if (i % block == 0 && i < args.numel) args.scales[i >> args.block_bits] = s.unit;

    Random4 random{};
    if (!kSum) random = random_words(args.seed, args.step, args.tensor, args.group + i / 4);
    cuda::Vector<float> value{};
    uint32_t chunk = 0;
    for (int k = 0; k < cuda::kVector; k++) {
      int q = 0;
      if (s.used && i + k < args.numel) {
        q = kSum ? quantize_sum(p[row].v[k], s, quant::top(bits))
                 : quantize(p[row].v[k], s, random.word[k]);
      }
      value.v[k] = dequantize(q, s.unit);
      chunk |= (static_cast<uint32_t>(q) & ((1u << bits) - 1)) << (k * bits);
    }
    store_codes(args.codes, i, args.numel, bits, chunk);

    if (kFeedback) {
      cuda::Vector<float> kept{};
      if (!(s.unit < kHuge)) kept = tile.load(args.residual, row);  // the block travels as NaN
      for (int k = 0; k < cuda::kVector; k++) {
        p[row].v[k] = residual_of(p[row].v[k], value.v[k], kept.v[k]);
      }
    }
  }
  if (kFeedback) tile.store(args.new_residual, args.numel, p);
}

template <bool kAdd>
__global__ void __launch_bounds__(cuda::kThreads) decode_kernel(const DecodeParams args) {
  const cuda::Tile<kSmall> tile(args.numel, args.out);
  if (tile.empty()) return;
  const int bits = static_cast<int>(args.options), sign = 1 << (bits - 1);

  uint32_t chunk[kSmall];
  float unit[kSmall];
#pragma unroll
  for (int row = 0; row < kSmall; row++) {
    const size_t i = tile.index(row);
    const bool there = i < args.numel;
    chunk[row] = there ? load_codes(args.codes, i, args.numel, bits) : 0;
    unit[row] = there ? args.scales[i >> args.block_bits] : 0.0f;
  }
  cuda::Vector<float> out[kSmall];
  if (kAdd) tile.load(args.out, out);
#pragma unroll
  for (int row = 0; row < kSmall; row++) {
    for (int k = 0; k < cuda::kVector; k++) {
      const uint32_t code = (chunk[row] >> (k * bits)) & ((1u << bits) - 1);
      const float value = dequantize(static_cast<int>(code ^ sign) - sign, unit[row]);
      out[row].v[k] = kAdd ? out[row].v[k] + value : value;
    }
  }
  tile.store(args.out, args.numel, out);
}

}  // namespace pycomm::codecs::ternary

namespace pycomm::codecs {

PYCOMM_KERNELS(ternary, PYCOMM_KERNEL(ternary::measure_kernel<4>),
               PYCOMM_KERNEL(ternary::measure_kernel<16>),
               PYCOMM_KERNEL(ternary::encode_kernel<false, false>),
               PYCOMM_KERNEL(ternary::encode_kernel<false, true>),
               PYCOMM_KERNEL(ternary::encode_kernel<true, false>),
               PYCOMM_KERNEL(ternary::encode_kernel<true, true>),
               PYCOMM_KERNEL(ternary::decode_kernel<false>),
               PYCOMM_KERNEL(ternary::decode_kernel<true>));

}  // namespace pycomm::codecs
