// Launchers of the kernels in block_cuda.h, for the .cu files of codecs with blocks.
#pragma once
#include "codecs/base/block_cuda.h"
#include "codecs/base/codec.h"
#include "core/cuda_launch.h"

namespace pycomm::codecs {

/// Returns the arguments of an encode. The payload is the scales and, from `offset` on, the codes.
inline EncodeParams encode_params(uint32_t block, size_t offset, const EncodeArgs& args) {
  EncodeParams params{};
  params.in = args.in.data;
  params.residual = args.residual;
  params.new_residual = args.new_residual;
  params.scales = reinterpret_cast<float*>(args.out.data);
  params.codes = args.out.data + offset;
  params.numel = args.in.size;
  params.seed = args.key.seed;
  params.group = args.index / 4;
  params.step = args.key.step;
  params.tensor = args.key.tensor;
  params.block_bits = __builtin_ctz(block);
  return params;
}

inline DecodeParams decode_params(uint32_t block, size_t offset, Span<const uint8_t> payload,
                                  Span<float> out) {
  DecodeParams params{};
  params.scales = reinterpret_cast<const float*>(payload.data);
  params.codes = payload.data + offset;
  params.out = out.data;
  params.numel = out.size;
  params.block_bits = __builtin_ctz(block);
  return params;
}

template <typename Coder>
void launch_encode(const char* codec, uint32_t block, size_t offset, const EncodeArgs& args) {
  const EncodeParams params = encode_params(block, offset, args);
  cuda::dispatch(block <= kSmall * cuda::kRow, [&](auto small) {
    constexpr int kRows = small ? kSmall : kLarge;
    cuda::dispatch(args.residual != nullptr, [&](auto feedback) {
      cuda::launch(codec, encode_blocks<Coder, kRows, feedback>, params, args.in.size,
                   kRows * cuda::kRow, args.stream);
    });
  });
}

template <typename Coder>
void launch_decode(const char* codec, uint32_t block, size_t offset, Span<const uint8_t> payload,
                   Span<float> out, bool add, Stream stream) {
  const DecodeParams params = decode_params(block, offset, payload, out);
  cuda::dispatch(add, [&](auto adds) {
    cuda::launch(codec, decode_blocks<Coder, adds>, params, out.size, kSmall * cuda::kRow, stream);
  });
}

}  // namespace pycomm::codecs
