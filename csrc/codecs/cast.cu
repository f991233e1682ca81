// cast in CUDA. Wire format: docs/wire/cast.md. The arithmetic is in cast.h, kernels with blocks in
// block_cuda.h. Compiled by nvcc, or at run time by NVRTC, which takes the kernels only.
#include "codecs/base/block_cuda.h"
#include "codecs/cast_cuda.h"

namespace pycomm::codecs::cast {

// ---------------------------------------------------------------- kernels

/// Encodes to the types without blocks. Codes are padded with zeros to a multiple of four bytes.
template <typename Type, bool kFeedback>
__global__ void __launch_bounds__(cuda::kThreads) encode_plain(const EncodeParams args) {
  using Code = typename Type::Code;
  auto* codes = reinterpret_cast<Code*>(args.codes);
  const cuda::Tile<kSmall> tile(args.numel, args.in, args.residual, args.new_residual, codes);
  if (tile.empty()) return;

  cuda::Vector<float> p[kSmall], residual[kSmall];
  tile.load(args.in, p);
  if (kFeedback) tile.load(args.residual, residual);
  cuda::Vector<Code> code[kSmall];
#pragma unroll
  for (int row = 0; row < kSmall; row++) {
    for (int k = 0; k < cuda::kVector; k++) {
      float value = p[row].v[k];
      if (kFeedback) value = value + residual[row].v[k];
      code[row].v[k] = Type::encode(value);
      if (kFeedback) {
        residual[row].v[k] = residual_of(value, Type::decode(code[row].v[k]), residual[row].v[k]);
      }
    }
  }
  tile.store(codes, padded(args.numel * sizeof(Code)) / sizeof(Code), code);
  if (kFeedback) tile.store(args.new_residual, args.numel, residual);
}

template <typename Type, bool kAdd>
__global__ void __launch_bounds__(cuda::kThreads) decode_plain(const DecodeParams args) {
  using Code = typename Type::Code;
  const auto* codes = reinterpret_cast<const Code*>(args.codes);
  const cuda::Tile<kSmall> tile(args.numel, args.out, codes);
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

// -------------------------------------------------------------- launchers

#ifndef __CUDACC_RTC__
#include "codecs/base/block_launch.h"
#include "codecs/cuda.h"

namespace pycomm::codecs::cast {
namespace {

template <typename Type>
void launch_encode_plain(const EncodeArgs& args) {
  EncodeParams params{};
  params.in = args.in.data;
  params.residual = args.residual;
  params.new_residual = args.new_residual;
  params.codes = args.out.data;
  params.numel = args.in.size;
  cuda::dispatch(args.residual != nullptr, [&](auto feedback) {
    cuda::launch("cast", encode_plain<Type, feedback>, params, args.in.size, kSmall * cuda::kRow,
                 args.stream);
  });
}

template <typename Type>
void launch_decode_plain(Span<const uint8_t> payload, Span<float> out, bool add, Stream stream) {
  DecodeParams params{};
  params.codes = payload.data;
  params.out = out.data;
  params.numel = out.size;
  cuda::dispatch(add, [&](auto adds) {
    cuda::launch("cast", decode_plain<Type, adds>, params, out.size, kSmall * cuda::kRow, stream);
  });
}

}  // namespace

void encode_cuda(const Format& format, const EncodeArgs& args) {
  const size_t offset = codes_offset(format, args.in.size);
  switch (format.kind) {
    case Kind::float32:
      return launch_encode_plain<Float32>(args);
    case Kind::float16:
      return launch_encode_plain<Float16>(args);
    case Kind::bfloat16:
      return launch_encode_plain<BFloat16>(args);
    case Kind::float8_e4m3:
      return launch_encode<Coder<Float8E4M3>>("cast", format.block, offset, args);
    case Kind::float8_e5m2:
      return launch_encode<Coder<Float8E5M2>>("cast", format.block, offset, args);
  }
}

void decode_cuda(const Format& format, Span<const uint8_t> payload, Span<float> out, bool add,
                 Stream stream) {
  const uint32_t block = format.block;
  const size_t offset = codes_offset(format, out.size);
  switch (format.kind) {
    case Kind::float32:
      return launch_decode_plain<Float32>(payload, out, add, stream);
    case Kind::float16:
      return launch_decode_plain<Float16>(payload, out, add, stream);
    case Kind::bfloat16:
      return launch_decode_plain<BFloat16>(payload, out, add, stream);
    case Kind::float8_e4m3:
      return launch_decode<Coder<Float8E4M3>>("cast", block, offset, payload, out, add, stream);
    case Kind::float8_e5m2:
      return launch_decode<Coder<Float8E5M2>>("cast", block, offset, payload, out, add, stream);
  }
}

}  // namespace pycomm::codecs::cast
#endif
