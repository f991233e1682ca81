// quant in CUDA. Wire format: docs/wire/quant.md. The arithmetic is in quant.h, but for
// rounding; kernels are in block_cuda.h. Compiled by nvcc, or at run time by NVRTC, which takes the
// coders only.
#include "codecs/base/bits_cuda.h"
#include "codecs/base/block_cuda.h"
#include "codecs/base/kernels_cuda.h"
#include "codecs/quant.h"

namespace pycomm::codecs::quant {

// ---------------------------------------------------------------- kernels

/// Words whose lowest bits are the codes of four values, and these codes as values.
struct RoundedRow {
  uint32_t word[4];
  cuda::Vector<float> value;
};

/// Does what round_randomly() does, with floats: conversions to integers take longer.
__device__ __forceinline__ float round_up_or_down(float v, uint32_t random, float top) {
  const float a = fabsf(v), down = floorf(a);
  const int threshold = static_cast<int>((a - down) * 0x1p31f);
  const float near = static_cast<int>(random >> 1) < threshold ? down + 1.0f : down;
  const float q = near < top ? near : top;
  return bits_float(float_bits(q) | (float_bits(v) & ~0x7fffffffu));
}

/// Rounds four values from value `group` * 4 of the tensor on; random rounding depends on the
/// place.
template <bool kRandom>
__device__ __forceinline__ RoundedRow round_row(const cuda::Vector<float>& p, float inv, int top,
                                                const EncodeParams& args, uint64_t group) {
  RoundedRow row;
  if constexpr (kRandom) {
    const Random4 random = random_words(args.seed, args.step, args.tensor, args.group + group);
    for (int k = 0; k < 4; k++) {
      row.value.v[k] = round_up_or_down(p.v[k] * inv, random.word[k], static_cast<float>(top));
    }
  } else {
    for (int k = 0; k < 4; k++) row.value.v[k] = p.v[k] * inv;
  }
  for (int k = 0; k < 4; k++) {  // round_nearest(): kRound ends in zeros, to which q is added
    const float sum = row.value.v[k] + kRound;
    row.word[k] = float_bits(sum);
    row.value.v[k] = sum - kRound;
  }
  return row;
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
  __device__ static Codes pack(const uint32_t (&q)[4]) {
    return __byte_perm(__byte_perm(q[0], q[1], 0x0040), __byte_perm(q[2], q[3], 0x0040), 0x5410);
  }
  __device__ static int unpack(Codes codes, int k) { return static_cast<int8_t>(codes >> (8 * k)); }
};

template <>
struct Packing<4> {
  using Codes = uint16_t;
  __device__ static Codes pack(const uint32_t (&q)[4]) {
    const auto pair = [](uint32_t even, uint32_t odd) { return (even & 15) | (odd << 4 & ~15u); };
    return static_cast<Codes>(__byte_perm(pair(q[0], q[1]), pair(q[2], q[3]), 0x0040));
  }
  __device__ static int unpack(Codes codes, int k) { return unpack4(codes >> (4 * k)); }
};

template <int kBits, bool kRandom>
struct Coder : WholeCodes<typename Packing<kBits>::Codes, kBits> {
  static constexpr bool kSignedZeros = false;
  using Codes = typename Packing<kBits>::Codes;
  __device__ static float top(const EncodeParams&) { return quant::top(kBits); }

  __device__ static Encoded<Codes> encode(const cuda::Vector<float>& p, float inv,
                                          const EncodeParams& args, uint64_t group) {
    const RoundedRow row = round_row<kRandom>(p, inv, quant::top(kBits), args, group);
    return {inv != 0.0f ? Packing<kBits>::pack(row.word) : Codes{0}, row.value};
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
  static constexpr bool kSignedZeros = false;
  using Codes = uint32_t;
  __device__ static float top(const EncodeParams& args) { return quant::top(bits_of(args)); }

  template <typename Params, typename Tile>
  __device__ static Codes load(const Params& args, const uint8_t* codes, const Tile& tile,
                               int row) {
    return load_codes(codes, tile.index(row), args.numel, bits_of(args));
  }
  template <typename Tile>
  __device__ static void store(const EncodeParams& args, const Tile& tile, int row, Codes codes) {
    store_codes(args.codes, tile.index(row), args.numel, bits_of(args), codes);
  }
  __device__ static Encoded<Codes> encode(const cuda::Vector<float>& p, float inv,
                                          const EncodeParams& args, uint64_t group) {
    const int bits = bits_of(args);
    const RoundedRow row = round_row<kRandom>(p, inv, quant::top(bits), args, group);
    Encoded<Codes> out{0, row.value};
    for (int k = 0; k < 4; k++) out.codes |= (row.word[k] & ((1u << bits) - 1)) << (k * bits);
    if (inv == 0.0f) out.codes = 0;
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

template <bool kFeedback>
constexpr int kBlocks<quant::WideCoder<true>, kFeedback> = kFeedback ? 2 : 3;

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
