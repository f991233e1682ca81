// quant in CUDA. Wire format: docs/wire/quant.md. The arithmetic is in quant.h, kernels in
// block_cuda.h. Compiled by nvcc, or at run time by NVRTC, which takes the coders only.
#include "codecs/base/bits_cuda.h"
#include "codecs/base/block_cuda.h"
#include "codecs/base/kernels_cuda.h"
#include "codecs/quant.h"

namespace pycomm::codecs::quant {

// ---------------------------------------------------------------- kernels

/// Codes of four values from value `group` * 4 of the tensor on; those of random rounding depend on
/// the place.
template <bool kRandom>
__device__ __forceinline__ void round_row(const cuda::Vector<float>& p, float inv, int top,
                                          const EncodeParams& args, uint64_t group, int (&q)[4]) {
  if constexpr (kRandom) {
    const Random4 random = random_words(args.seed, args.step, args.tensor, args.group + group);
    for (int k = 0; k < 4; k++) q[k] = round_randomly(p.v[k] * inv, random.word[k], top);
  } else {
    for (int k = 0; k < 4; k++) q[k] = round_nearest(p.v[k] * inv);
  }
}

__device__ __forceinline__ cuda::Vector<float> values_of(const int (&q)[4], float unit) {
  cuda::Vector<float> value;
  for (int k = 0; k < 4; k++) value.v[k] = dequantize(q[k], unit);
  return value;
}

/// Four codes of 8 bits are one word, four of 4 bits half a word.
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

template <int kBits, bool kRandom>
struct Coder : WholeCodes<typename Packing<kBits>::Codes, kBits> {
  using Codes = typename Packing<kBits>::Codes;
  __device__ static float top(const EncodeParams&) { return quant::top(kBits); }

  __device__ static Encoded<Codes> encode(const cuda::Vector<float>& p, float inv,
                                          const EncodeParams& args, uint64_t group) {
    int q[4];
    round_row<kRandom>(p, inv, quant::top(kBits), args, group, q);
    return {Packing<kBits>::pack(q), values_of(q, 1.0f)};
  }
  template <typename Params>
  __device__ static cuda::Vector<float> decode(const Params&, Codes codes, float scale) {
    int q[4];
    for (int k = 0; k < 4; k++) q[k] = Packing<kBits>::unpack(codes, k);
    return values_of(q, scale);
  }
};

/// Coder of the other widths, which the options of a call say.
template <bool kRandom>
struct WideCoder {
  using Codes = uint32_t;
  __device__ static float top(const EncodeParams& args) { return quant::top(bits_of(args)); }

  template <typename Params>
  __device__ static Codes load(const Params& args, const uint8_t* codes, size_t i) {
    return load_codes(codes, i, args.numel, bits_of(args));
  }
  __device__ static void store(const EncodeParams& args, size_t i, Codes codes) {
    store_codes(args.codes, i, args.numel, bits_of(args), codes);
  }
  __device__ static Encoded<Codes> encode(const cuda::Vector<float>& p, float inv,
                                          const EncodeParams& args, uint64_t group) {
    const int bits = bits_of(args);
    int q[4];
    round_row<kRandom>(p, inv, quant::top(bits), args, group, q);
    Encoded<Codes> out{0, values_of(q, 1.0f)};
    for (int k = 0; k < 4; k++) {
      out.codes |= (static_cast<uint32_t>(q[k]) & ((1u << bits) - 1)) << (k * bits);
    }
    return out;
  }
  template <typename Params>
  __device__ static cuda::Vector<float> decode(const Params& args, Codes codes, float scale) {
    const int bits = bits_of(args), sign = 1 << (bits - 1);
    int q[4];
    for (int k = 0; k < 4; k++) {
      const uint32_t code = (codes >> (k * bits)) & ((1u << bits) - 1);
      q[k] = static_cast<int>(code ^ sign) - sign;
    }
    return values_of(q, scale);
  }

 private:
  template <typename Params>
  __device__ static int bits_of(const Params& args) {
    return static_cast<int>(args.options);
  }
};

}  // namespace pycomm::codecs::quant

namespace pycomm::codecs {

#define ENCODE(...)                                                \
  PYCOMM_KERNEL(encode_blocks<quant::__VA_ARGS__, 4, false>),      \
      PYCOMM_KERNEL(encode_blocks<quant::__VA_ARGS__, 4, true>),   \
      PYCOMM_KERNEL(encode_blocks<quant::__VA_ARGS__, 16, false>), \
      PYCOMM_KERNEL(encode_blocks<quant::__VA_ARGS__, 16, true>)
#define DECODE(...)                                        \
  PYCOMM_KERNEL(decode_blocks<quant::__VA_ARGS__, false>), \
      PYCOMM_KERNEL(decode_blocks<quant::__VA_ARGS__, true>)
#define CODES(bits) \
  ENCODE(Coder<bits, false>), ENCODE(Coder<bits, true>), DECODE(Coder<bits, false>)
PYCOMM_KERNELS(quant, CODES(8), CODES(4), ENCODE(WideCoder<false>), ENCODE(WideCoder<true>),
               DECODE(WideCoder<false>));
#undef ENCODE
#undef DECODE
#undef CODES

}  // namespace pycomm::codecs
