// cast in CUDA. Wire format: docs/wire/cast.md. The arithmetic is in cast.h, kernels with blocks in
// block_cuda.h. Compiled by nvcc, or at run time by NVRTC, which takes the kernels only.
#include "codecs/base/block_cuda.h"
#include "codecs/base/kernels_cuda.h"
#include "codecs/cast.h"

namespace pycomm::codecs::cast {

/// float8: four codes are one word.
template <typename Type>
struct Coder : WholeCodes<uint32_t, 8> {
  static constexpr bool kSignedZeros = true;
  __device__ static float top(const EncodeParams&) { return Type::kTop; }

  __device__ static Encoded<Codes> encode(const cuda::Vector<float>& p, float inv,
                                          const EncodeParams&, uint64_t) {
    Encoded<Codes> out{};
    for (int k = 0; k < 4; k++) {
      const Rounded rounded = Type::round(p.v[k] * inv);
      out.codes |= rounded.code << (8 * k);
      out.value.v[k] = rounded.value;
    }
    if (inv == 0.0f) out.codes = 0;
    return out;
  }

  template <typename Params>
  __device__ static cuda::Vector<float> decode(const Params&, Codes codes, float scale) {
    cuda::Vector<float> value;
    for (int k = 0; k < 4; k++)
      value.v[k] = Type::decode_by_product((codes >> (8 * k)) & 255) * scale;
    return value;
  }
};

// ---------------------------------------------------------------- kernels

/// Blocks on a multiprocessor that leave registers enough to spill none: rounding to Float16, which
/// is made of integers, takes most.
template <typename Type, bool kFeedback>
constexpr int kBlocks = kFeedback ? 3 : 5;
template <>
constexpr int kBlocks<Float16, true> = 2;

/// Encodes to the types without blocks. Codes are padded with zeros to a multiple of four bytes.
template <typename Type, bool kFeedback>
__global__ void __launch_bounds__(cuda::kThreads, kBlocks<Type, kFeedback>)
    encode_plain(const Batch<EncodeParams> batch) {
  const EncodeParams args = tensor_of_block(batch);
  using Code = typename Type::Code;
  auto* codes = reinterpret_cast<Code*>(args.codes);
  const cuda::Tile<kSmall> tile = tile_of<kSmall>(args, codes);
  if (tile.empty()) return;

  cuda::Vector<float> p[kSmall];
  // The values of an exact payload of any rank may be aligned to four bytes alone.
  load_values<kFeedback>(tile, args, p, [&](const uint8_t* payload, int row) {
    const auto* from = reinterpret_cast<const Code*>(payload) + tile.index(row);
    cuda::Vector<float> value{};
    const int left = tile.left_of(args.numel) - row * cuda::kRow;
    for (int k = 0; k < cuda::kVector && k < left; k++) value.v[k] = Type::decode(from[k]);
    return value;
  });
  cuda::Vector<Code> code[kSmall];
  bool lost = false;  // a value travels as Inf or NaN
#pragma unroll
  for (int row = 0; row < kSmall; row++) {
    for (int k = 0; k < cuda::kVector; k++) {
      const float value = p[row].v[k];
      code[row].v[k] = Type::encode(value);
      if (!kFeedback) continue;
      const float decoded = Type::decode(code[row].v[k]);
      p[row].v[k] = value - decoded;
      lost |= magnitude_bits(decoded) >= kInfBits;
    }
  }
  tile.store(codes, padded(args.numel * sizeof(Code)) / sizeof(Code), code);
  if constexpr (kFeedback) {
#pragma unroll
    for (int row = 0; row < kSmall && lost; row++) {
      const cuda::Vector<float> kept = load_residual(tile, args, row);
      for (int k = 0; k < cuda::kVector; k++) {
        const float decoded = Type::decode(code[row].v[k]);
        if (magnitude_bits(decoded) >= kInfBits) p[row].v[k] = kept.v[k];
      }
    }
    store_residual(tile, args, p);
  }
}

template <typename Type, bool kAdd>
__global__ void __launch_bounds__(cuda::kThreads) decode_plain(const Batch<DecodeParams> batch) {
  const DecodeParams args = tensor_of_block(batch);
  using Code = typename Type::Code;
  const auto* codes = reinterpret_cast<const Code*>(args.codes);
  const cuda::Tile<kSmall> tile(block_of(args), args.numel, args.out, codes);
  if (tile.empty()) return;

  cuda::Vector<Code> code[kSmall];
  tile.load(codes, code);
  cuda::Vector<float> value[kSmall];
  if (kAdd) tile.load(args.out, value);
#pragma unroll
  for (int row = 0; row < kSmall; row++) {
    for (int k = 0; k < cuda::kVector; k++) {
      const float decoded = Type::decode(code[row].v[k]);
      value[row].v[k] = kAdd ? value[row].v[k] + decoded : decoded;
    }
  }
  tile.store(args.out, args.numel, value);
}

}  // namespace pycomm::codecs::cast

namespace pycomm::codecs {

#define PLAIN(Type)                                                                              \
  PYCOMM_KERNEL(cast::encode_plain<Type, false>), PYCOMM_KERNEL(cast::encode_plain<Type, true>), \
      PYCOMM_KERNEL(cast::decode_plain<Type, false>),                                            \
      PYCOMM_KERNEL(cast::decode_plain<Type, true>)
#define BLOCKS(Coder)                                                                            \
  PYCOMM_KERNEL(encode_blocks<Coder, 4, false>), PYCOMM_KERNEL(encode_blocks<Coder, 4, true>),   \
      PYCOMM_KERNEL(encode_blocks<Coder, 16, false>),                                            \
      PYCOMM_KERNEL(encode_blocks<Coder, 16, true>), PYCOMM_KERNEL(decode_blocks<Coder, false>), \
      PYCOMM_KERNEL(decode_blocks<Coder, true>)
PYCOMM_KERNELS(cast, PLAIN(cast::Float32), PLAIN(cast::Float16), PLAIN(cast::BFloat16),
               BLOCKS(cast::Coder<cast::Float8E4M3>), BLOCKS(cast::Coder<cast::Float8E5M2>));
#undef PLAIN
#undef BLOCKS

}  // namespace pycomm::codecs
