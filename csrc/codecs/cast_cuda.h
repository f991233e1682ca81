// Coder of cast's float8, for its own kernels and for those of rotate. The arithmetic is in cast.h.
// Compiled by nvcc and NVRTC.
#pragma once
#include "codecs/base/block_cuda.h"
#include "codecs/cast.h"

namespace pycomm::codecs::cast {

/// float8: four codes are one word.
template <typename Type>
struct Coder {
  static constexpr int kBits = 8;
  static constexpr float kTop = Type::kTop;
  using Codes = uint32_t;

  __device__ static Encoded<Codes> encode(const cuda::Vector<float>& p, float inv,
                                          const EncodeParams&, uint64_t) {
    Encoded<Codes> out{};
    for (int k = 0; k < 4; k++) {
      const Rounded rounded = Type::round(p.v[k] * inv);
      out.codes |= rounded.code << (8 * k);
      out.value.v[k] = rounded.value;
    }
    return out;
  }

  __device__ static cuda::Vector<float> decode(Codes codes, float scale) {
    cuda::Vector<float> value;
    for (int k = 0; k < 4; k++) value.v[k] = Type::decode((codes >> (8 * k)) & 255) * scale;
    return value;
  }
};

}  // namespace pycomm::codecs::cast
