// quant in CUDA. Wire format: docs/wire/quant.md. The arithmetic is in quant.h, kernels in
// block_cuda.h. Compiled by nvcc, or at run time by NVRTC, which takes the coders only.
#include "codecs/base/block_cuda.h"
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

// -------------------------------------------------------------- launchers

#ifndef __CUDACC_RTC__
#include "codecs/base/block_launch.h"
#include "codecs/cuda.h"

namespace pycomm::codecs::quant {
namespace {

/// True for formats with kernels of their own.
bool plain(const Format& f) {
  return (f.bits == 8 || f.bits == 4) && !f.minmax && !f.bfloat16 &&
         f.rounding != Rounding::correlated;
}

void encode_wide_cuda(const Format& format, size_t offset, const EncodeArgs& args) {
  EncodeParams params = encode_params(format.block, offset, args);
  params.shift = rank_shift(format.rounding, args.key.rank, args.key.ranks);
  params.options = options_of(format);
  cuda::dispatch(format.block <= kSmall * cuda::kRow, [&](auto small) {
    constexpr int kRows = small ? kSmall : kLarge;
    cuda::dispatch(format.rounding != Rounding::nearest, [&](auto random) {
      cuda::dispatch(args.residual != nullptr, [&](auto feedback) {
        cuda::launch("quant", encode_wide<kRows, random, feedback>, params, args.in.size,
                     kRows * cuda::kRow, args.stream);
      });
    });
  });
}

}  // namespace

void encode_cuda(const Format& format, const EncodeArgs& args) {
  const size_t offset = codes_offset(format, args.in.size);
  if (!plain(format)) return encode_wide_cuda(format, offset, args);
  cuda::dispatch(format.bits == 8, [&](auto eight) {
    cuda::dispatch(format.rounding == Rounding::stochastic, [&](auto stochastic) {
      launch_encode<Coder<eight ? 8 : 4, stochastic>>("quant", format.block, offset, args);
    });
  });
}

void decode_cuda(const Format& format, Span<const uint8_t> payload, Span<float> out, bool add,
                 Stream stream) {
  const size_t offset = codes_offset(format, out.size);
  if (!plain(format)) {
    DecodeParams params = decode_params(format.block, offset, payload, out);
    params.options = options_of(format);
    return cuda::dispatch(add, [&](auto adds) {
      cuda::launch("quant", decode_wide<adds>, params, out.size, kSmall * cuda::kRow, stream);
    });
  }
  cuda::dispatch(format.bits == 8, [&](auto eight) {
    launch_decode<Coder<eight ? 8 : 4, false>>("quant", format.block, offset, payload, out, add,
                                               stream);
  });
}

}  // namespace pycomm::codecs::quant
#endif
