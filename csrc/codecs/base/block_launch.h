// Launches of the kernels in block_cuda.h, for the .cpp files of codecs with blocks.
#pragma once
#include "codecs/base/codec.h"
#include "codecs/base/launch.h"
#include "codecs/base/params.h"

namespace pycomm::codecs {

/// Returns the arguments of an encode. The payload is the scales and, from `offset` on, the codes.
inline EncodeParams encode_params(uint32_t block, size_t offset, const EncodeArgs& args) {
  EncodeParams params{};
  params.in = args.in.data;
  params.payloads = args.sum.payloads;
  params.stride = args.sum.stride;
  params.ranks = args.sum.ranks;
  params.divisor = args.sum.divisor;
  params.residual = args.residual.old;
  params.new_residual = args.residual.fresh;
  params.form = args.residual.form;
  params.decay = args.residual.decay;
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

/// Returns the rows of a tile that holds whole blocks.
inline int rows_of(uint32_t block) { return block <= kSmall * cuda::kRow ? kSmall : kLarge; }

/// `coder` is the name of the type that the kernels take, and `options` is for it.
inline void launch_encode(const char* codec, const std::string& coder, uint32_t block,
                          size_t offset, const EncodeArgs& args, uint32_t options = 0) {
  const int rows = rows_of(block);
  EncodeParams params = encode_params(block, offset, args);
  params.options = options;
  launch(codec, kernel_name("encode_blocks", coder, rows, args.has_residual()), params,
         args.in.size, rows * cuda::kRow, args.stream);
}

inline void launch_decode(const char* codec, const std::string& coder, uint32_t block,
                          size_t offset, Span<const uint8_t> payload, Span<float> out, bool add,
                          const Stream& stream, uint32_t options = 0) {
  DecodeParams params = decode_params(block, offset, payload, out);
  params.options = options;
  launch(codec, kernel_name("decode_blocks", coder, add), params, out.size, kSmall * cuda::kRow,
         stream);
}

}  // namespace pycomm::codecs
