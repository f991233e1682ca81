// Arguments of the kernels of rotate and eden, for their .cpp files.
#pragma once
#include "codecs/base/block_launch.h"
#include "codecs/rotation/rotation.h"

namespace pycomm::codecs {

/// Returns the arguments of an encode. The payload is the header, scales, and `offset` bytes after
/// the header the codes.
inline EncodeParams rotation_params(int size_bits, uint32_t block, size_t offset,
                                    const EncodeArgs& args) {
  EncodeParams params = encode_params(block, sizeof(RotationHeader) + offset, args);
  params.header = reinterpret_cast<uint32_t*>(args.out.data);
  params.scales = reinterpret_cast<float*>(args.out.data + sizeof(RotationHeader));
  params.key = rotation_key(args.key.seed, args.key.step, args.key.tensor);
  params.rotation_bits = size_bits;
  return params;
}

inline DecodeParams rotation_params(int size_bits, uint32_t block, size_t offset,
                                    Span<const uint8_t> payload, Span<float> out, bool add) {
  DecodeParams params = decode_params(block, sizeof(RotationHeader) + offset, payload, out);
  params.header = reinterpret_cast<const uint32_t*>(payload.data);
  params.scales = reinterpret_cast<const float*>(payload.data + sizeof(RotationHeader));
  params.rotation_bits = size_bits;
  params.add = add;
  return params;
}

}  // namespace pycomm::codecs
