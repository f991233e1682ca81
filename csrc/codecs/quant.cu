// quant in CUDA. Wire format: docs/wire/quant.md. The arithmetic is in quant.h, kernels in
// block_cuda.h. Compiled by nvcc, or at run time by NVRTC, which takes the coders only.
#include "codecs/base/block_cuda.h"
#include "codecs/base/kernels_cuda.h"
#include "codecs/quant.h"
#include "codecs/quant_cuda.h"

namespace pycomm::codecs::quant {

// ---------------------------------------------------------------- kernels

/// Coder: four codes of 8 bits are one word, four of 4 bits half a word.
template <int kBits>
struct Packing;

template <>
struct Packing<8> {
  using Codes = uint32_t;
  __device__ static Codes pack(const int (&q)[4]) {
    return (q[0] & 255) | (q[1] & 255) << 8 | (q[2] & 255) << 16 | q[3] << 24;
  }
  __device__ static int unpack(Codes codes, int k) { return static_cast<int8_t>(codes >> (8 * k)); }
};

template <>
struct Packing<4> {
  using Codes = uint16_t;
  __device__ static Codes pack(const int (&q)[4]) {
    return static_cast<Codes>(pack4(q[0], q[1]) | pack4(q[2], q[3]) << 8);
  }
  __device__ static int unpack(Codes codes, int k) { return unpack4(codes >> (4 * k)); }
};

template <int kBitsOfCode, bool kStochastic>
struct Coder {
  static constexpr int kBits = kBitsOfCode;
  static constexpr float kTop = top(kBits);
  using Codes = typename Packing<kBits>::Codes;

  /// `group` counts groups of four values from in[0].
  __device__ static Encoded<Codes> encode(const cuda::Vector<float>& p, float inv,
                                          const EncodeParams& args, uint64_t group) {
    int q[4];
    if constexpr (kStochastic) {
      const Random4 random = random_words(args.seed, args.step, args.tensor, args.group + group);
      for (int k = 0; k < 4; k++) q[k] = round_randomly(p.v[k] * inv, random.word[k], top(kBits));
    } else {
      for (int k = 0; k < 4; k++) q[k] = round_nearest(p.v[k] * inv);
    }
    Encoded<Codes> out{Packing<kBits>::pack(q), {}};
    for (int k = 0; k < 4; k++) out.value.v[k] = static_cast<float>(q[k]);
    return out;
  }

  __device__ static cuda::Vector<float> decode(Codes codes, float scale) {
    cuda::Vector<float> value;
    for (int k = 0; k < 4; k++) value.v[k] = dequantize(Packing<kBits>::unpack(codes, k), scale);
    return value;
  }
};

}  // namespace pycomm::codecs::quant

namespace pycomm::codecs {

#define ENCODE(bits, random)                                               \
  PYCOMM_KERNEL(encode_blocks<quant::Coder<bits, random>, 4, false>),      \
      PYCOMM_KERNEL(encode_blocks<quant::Coder<bits, random>, 4, true>),   \
      PYCOMM_KERNEL(encode_blocks<quant::Coder<bits, random>, 16, false>), \
      PYCOMM_KERNEL(encode_blocks<quant::Coder<bits, random>, 16, true>)
#define DECODE(bits)                                              \
  PYCOMM_KERNEL(decode_blocks<quant::Coder<bits, false>, false>), \
      PYCOMM_KERNEL(decode_blocks<quant::Coder<bits, false>, true>)
#define WIDE(rows, random)                                \
  PYCOMM_KERNEL(quant::encode_wide<rows, random, false>), \
      PYCOMM_KERNEL(quant::encode_wide<rows, random, true>)
PYCOMM_KERNELS(quant, ENCODE(8, false), ENCODE(8, true), ENCODE(4, false), ENCODE(4, true),
               DECODE(8), DECODE(4), WIDE(4, false), WIDE(4, true), WIDE(16, false), WIDE(16, true),
               PYCOMM_KERNEL(quant::decode_wide<false>), PYCOMM_KERNEL(quant::decode_wide<true>));
#undef ENCODE
#undef DECODE
#undef WIDE

}  // namespace pycomm::codecs
