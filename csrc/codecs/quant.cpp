// quant on the CPU: plain loops over quant.h, compiled for several x86 levels.
#include "codecs/quant.h"

#include "codecs/base/bits.h"
#include "codecs/base/block_launch.h"
#include "codecs/base/loops.h"
#include "codecs/base/options.h"
#include "codecs/base/registry.h"

namespace pycomm::codecs::quant {
namespace {

constexpr const char* kRoundings[] = {"nearest", "stochastic", "correlated"};

PYCOMM_INLINE void min_max(const float* __restrict x, size_t n, int32_t& low, int32_t& high) {
  int32_t least = to_order(x[0]), most = least;
  for (size_t i = 0; i < n; i++) {
    const int32_t order = to_order(x[i]);
    least = order < least ? order : least;
    most = order > most ? order : most;
  }
  low = least;
  high = most;
}

/// Scales and codes, for encode_blocks.
template <bool kMinMax, bool kRandom>
struct Writer {
  Format format;
  uint8_t* scales;
  Packer codes;
  RandomKey key;
  uint64_t index;

  PYCOMM_INLINE Scale scale(size_t block, const float* x, size_t n) const {
    if constexpr (kMinMax) {
      int32_t low, high;
      min_max(x, n, low, high);
      return put(block, minmax_scale(format, from_order(low), from_order(high)));
    } else {
      return put(block, symmetric_scale(format, max_magnitude(x, n)));
    }
  }
  PYCOMM_INLINE Scale scale(size_t block, const float* x, const float* residual, size_t n,
                            float* __restrict p) const {
    if constexpr (kMinMax) {
      for (size_t i = 0; i < n; i++) p[i] = x[i] + residual[i];
      return scale(block, p, n);
    } else {
      return put(block, symmetric_scale(format, add_max_magnitude(x, residual, n, p)));
    }
  }
  PYCOMM_INLINE void write(size_t lo, const float* p, size_t n, Scale s) const {
    write_block<false>(lo, p, n, s, nullptr);
  }
  PYCOMM_INLINE void write(size_t lo, const float* p, size_t n, Scale s,
                           float* new_residual) const {
    write_block<true>(lo, p, n, s, new_residual);
  }
  PYCOMM_INLINE void zero(size_t lo, size_t n) const {
    std::memset(codes.at(lo), 0, n);
    codes.written(lo + n);
  }

 private:
  PYCOMM_INLINE Scale put(size_t block, Scale s) const {
    if (format.bfloat16) {
      auto* to = reinterpret_cast<uint16_t*>(scales) + block * (kMinMax ? 2 : 1);
      to[0] = static_cast<uint16_t>(float_bits(s.unit) >> 16);
      if (kMinMax) to[1] = static_cast<uint16_t>(float_bits(s.low) >> 16);
    } else {
      auto* to = reinterpret_cast<float*>(scales) + block * (kMinMax ? 2 : 1);
      to[0] = s.unit;
      if (kMinMax) to[1] = s.low;
    }
    return s;
  }

  template <bool kFeedback>
  PYCOMM_INLINE void write_block(size_t lo, const float* __restrict p, size_t n, Scale s,
                                 float* __restrict new_residual) const {
    alignas(64) uint32_t words[kRandom ? kMaxBlock : 1];
    if (kRandom) random_block(key, index + lo, n, words);
    const uint32_t shift = rank_shift(format.rounding, key.rank, key.ranks);
    const int most = top(format);
    uint8_t* __restrict q = codes.at(lo);
    for (size_t i = 0; i < n; i++) {
      const float v = (kMinMax ? p[i] - s.low : p[i]) * s.inv;
      const int code = kRandom ? round_randomly(v, words[i] + shift, most) : round_nearest(v);
      q[i] = static_cast<uint8_t>(code);
      if (kFeedback) {
        new_residual[i] =
            p[i] - (kMinMax ? dequantize(code, s.unit, s.low) : dequantize(code, s.unit));
      }
    }
    codes.written(lo + n);
  }
};

template <bool kMinMax, bool kRandom>
PYCOMM_SIMD void encode_all(const Format& f, const EncodeArgs& args) {
  alignas(64) uint8_t tile[kMaxBlock];
  const Packer codes{f.bits, args.in.size, args.out.data + codes_offset(f, args.in.size), tile};
  encode_blocks(args, f.block,
                Writer<kMinMax, kRandom>{f, args.out.data, codes, args.key, args.index});
}

/// Reads unit and low of a block.
template <bool kMinMax>
PYCOMM_INLINE void read_scale(const Format& f, const uint8_t* scales, size_t block, float& unit,
                              float& low) {
  const size_t at = block * (kMinMax ? 2 : 1);
  if (f.bfloat16) {
    const auto* from = reinterpret_cast<const uint16_t*>(scales) + at;
    unit = BFloat16::decode(from[0]);
    low = kMinMax ? BFloat16::decode(from[1]) : 0.0f;
  } else {
    const auto* from = reinterpret_cast<const float*>(scales) + at;
    unit = from[0];
    low = kMinMax ? from[1] : 0.0f;
  }
}

template <bool kMinMax, bool kAdd>
PYCOMM_SIMD void decode_all(const Format& f, Span<const uint8_t> payload, Span<float> out) {
  alignas(64) uint8_t tile[kMaxBlock];
  const Unpacker codes{f.bits, out.size, payload.data + codes_offset(f, out.size), tile};
  const int sign = kMinMax ? 0 : 1 << (f.bits - 1);
  size_t block = 0;
  for (size_t lo = 0; lo < out.size; lo += f.block, block++) {
    const size_t n = out.size - lo < f.block ? out.size - lo : f.block;
    float unit, low;
    read_scale<kMinMax>(f, payload.data, block, unit, low);
    const uint8_t* __restrict q = codes.at(lo);
    float* __restrict to = out.data + lo;
    for (size_t i = 0; i < n; i++) {
      const int code = (q[i] ^ sign) - sign;
      const float value = kMinMax ? dequantize(code, unit, low) : dequantize(code, unit);
      to[i] = kAdd ? to[i] + value : value;
    }
  }
}

// ---------------------------------------------------- launches in CUDA (quant.cu)

/// True for formats with kernels of their own; quant_cuda.h has those of the others.
bool plain(const Format& f) {
  return (f.bits == 8 || f.bits == 4) && !f.minmax && !f.bfloat16 &&
         f.rounding != Rounding::correlated;
}

void encode_cuda(const Format& format, const EncodeArgs& args) {
  const size_t offset = codes_offset(format, args.in.size);
  const bool random = format.rounding != Rounding::nearest;
  if (plain(format)) {
    const std::string coder = kernel_name("quant::Coder", format.bits, random);
    return launch_encode("quant", coder, format.block, offset, args);
  }
  EncodeParams params = encode_params(format.block, offset, args);
  params.shift = rank_shift(format.rounding, args.key.rank, args.key.ranks);
  params.options = options_of(format);
  const int rows = rows_of(format.block);
  launch("quant", kernel_name("quant::encode_wide", rows, random, args.has_residual()), params,
         args.in.size, rows * cuda::kRow, args.stream);
}

void decode_cuda(const Format& format, Span<const uint8_t> payload, Span<float> out, bool add,
                 const Stream& stream) {
  const size_t offset = codes_offset(format, out.size);
  if (plain(format)) {
    const std::string coder = kernel_name("quant::Coder", format.bits, false);
    return launch_decode("quant", coder, format.block, offset, payload, out, add, stream);
  }
  DecodeParams params = decode_params(format.block, offset, payload, out);
  params.options = options_of(format);
  launch("quant", kernel_name("quant::decode_wide", add), params, out.size, kSmall * cuda::kRow,
         stream);
}

class Quant final : public Codec {
 public:
  explicit Quant(const Format& format) : format_(format) {}

  std::string_view name() const override { return "quant"; }
  std::string spec() const override {
    return "quant:bits=" + std::to_string(format_.bits) +
           ",block=" + std::to_string(format_.block) +
           ",rounding=" + kRoundings[static_cast<int>(format_.rounding)] +
           (format_.minmax ? ",range=minmax" : "") + (format_.bfloat16 ? ",scale=bfloat16" : "");
  }
  Combine combine() const override { return Combine::recode; }
  int wire_version() const override { return kWireVersion; }
  bool fuses_residual() const override { return true; }
  bool fuses_sum() const override { return true; }
  size_t granule() const override { return format_.block; }
  size_t encoded_bytes(size_t numel) const override { return quant::encoded_bytes(format_, numel); }
  bool shared_seed() const override { return format_.rounding == Rounding::correlated; }

  void encode(const EncodeArgs& args) const override {
    check_encode(*this, args);
    if (args.stream.device == Device::cuda) return encode_cuda(format_, args);
    const bool random = format_.rounding != Rounding::nearest;
    const auto run = format_.minmax ? (random ? encode_all<true, true> : encode_all<true, false>)
                                    : (random ? encode_all<false, true> : encode_all<false, false>);
    run(format_, args);
    const size_t blocks = num_blocks(args.in.size, format_.block);
    const size_t offset = codes_offset(format_, args.in.size);
    zero_padding(args.out.sub(0, offset), blocks * scale_bytes(format_));
    zero_padding(args.out, offset + (args.in.size * format_.bits + 7) / 8);
  }
  void decode(Span<const uint8_t> payload, Span<float> out, Stream stream) const override {
    check_decode(*this, payload, out);
    if (stream.device == Device::cuda) return decode_cuda(format_, payload, out, false, stream);
    (format_.minmax ? decode_all<true, false> : decode_all<false, false>)(format_, payload, out);
  }
  void decode_add(Span<const uint8_t> payload, Span<float> out, Stream stream) const override {
    check_decode(*this, payload, out);
    if (stream.device == Device::cuda) return decode_cuda(format_, payload, out, true, stream);
    (format_.minmax ? decode_all<true, true> : decode_all<false, true>)(format_, payload, out);
  }

 private:
  Format format_;
};

}  // namespace

std::unique_ptr<Codec> make(Options& options) {
  Format format;
  format.bits = options.integer("bits", 8);
  if (format.bits < 2 || format.bits > 8) {
    options.fail("bits=" + std::to_string(format.bits) + ": use 2 to 8");
  }
  format.block = block_option(options, format.bits > 5 ? 256 : format.bits > 3 ? 128 : 64);
  format.rounding = static_cast<Rounding>(
      options.choice("rounding", {kRoundings[0], kRoundings[1], kRoundings[2]}, 0));
  format.minmax = options.choice("range", {"symmetric", "minmax"}, 0) == 1;
  format.bfloat16 = options.choice("scale", {"float32", "bfloat16"}, 0) == 1;
  options.finish();
  return std::make_unique<Quant>(format);
}

}  // namespace pycomm::codecs::quant
