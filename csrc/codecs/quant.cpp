// quant: plain loops over quant.h, compiled for several x86 levels, and the launches of quant.cu.
#include "codecs/quant.h"

#include "codecs/base/bits.h"
#include "codecs/base/block_launch.h"
#include "codecs/base/loops.h"
#include "codecs/base/options.h"

namespace pycomm::codecs::quant {
namespace {

constexpr const char* kRoundings[] = {"nearest", "stochastic"};

/// Scales and codes, for encode_blocks.
template <bool kRandom>
struct Writer {
  int top;
  float* scales;
  Packer codes;
  RandomKey key;
  uint64_t index;

  PYCOMM_INLINE Scale scale(size_t block, float amax) const {
    const Scale s = symmetric_scale(amax, static_cast<float>(top));
    scales[block] = s.unit;
    return s;
  }
  PYCOMM_INLINE void zero(size_t lo, size_t n) const {
    std::memset(codes.at(lo), 0, n);
    codes.written(lo + n);
  }
  template <bool kFeedback>
  PYCOMM_INLINE void write(size_t lo, const float* __restrict p, size_t n, Scale s,
                           float* __restrict new_residual) const {
    alignas(64) uint32_t words[kRandom ? kMaxBlock : 1];
    if (kRandom) random_block(key, index + lo, n, words);
    uint8_t* __restrict q = codes.at(lo);
    for (size_t i = 0; i < n; i++) {
      const float v = p[i] * s.inv;
      const int code = kRandom ? round_randomly(v, words[i], top) : round_nearest(v);
      q[i] = static_cast<uint8_t>(code);
      if (kFeedback) new_residual[i] = p[i] - dequantize(code, s.unit);
    }
    codes.written(lo + n);
  }
};

template <bool kRandom>
PYCOMM_SIMD void encode_all(const Format& f, const EncodeArgs& args) {
  alignas(64) uint8_t tile[kMaxBlock];
  const Packer codes{f.bits, args.in.size, args.out.data + codes_offset(f, args.in.size), tile};
  encode_blocks(args, f.block,
                Writer<kRandom>{top(f.bits), reinterpret_cast<float*>(args.out.data), codes,
                                args.key, args.index});
}

template <bool kAdd>
PYCOMM_SIMD void decode_all(const Format& f, Span<const uint8_t> payload, Span<float> out) {
  alignas(64) uint8_t tile[kMaxBlock];
  const Unpacker codes{f.bits, out.size, payload.data + codes_offset(f, out.size), tile};
  const int sign = 1 << (f.bits - 1);
  const auto* scales = reinterpret_cast<const float*>(payload.data);
  for (size_t lo = 0; lo < out.size; lo += f.block) {
    const size_t n = out.size - lo < f.block ? out.size - lo : f.block;
    const float unit = *scales++;
    const uint8_t* __restrict q = codes.at(lo);
    float* __restrict to = out.data + lo;
    for (size_t i = 0; i < n; i++) {
      const float value = dequantize((q[i] ^ sign) - sign, unit);
      to[i] = kAdd ? to[i] + value : value;
    }
  }
}

// ---------------------------------------------------- launches in CUDA (quant.cu)

/// Returns the name of a coder: 8 and 4 bits have one of their own.
std::string coder_name(const Format& f, bool random) {
  return f.bits == 8 || f.bits == 4 ? kernel_name("quant::Coder", f.bits, random)
                                    : kernel_name("quant::WideCoder", random);
}

class Quant final : public Codec {
 public:
  explicit Quant(const Format& format) : format_(format) {}

  std::string_view name() const override { return "quant"; }
  std::string spec() const override {
    return "quant:bits=" + std::to_string(format_.bits) +
           ",block=" + std::to_string(format_.block) +
           ",rounding=" + kRoundings[format_.random ? 1 : 0];
  }
  int wire_version() const override { return kWireVersion; }
  bool fuses_residual() const override { return true; }
  bool loads_residual() const override { return true; }
  bool fuses_sum() const override { return true; }
  size_t granule() const override { return format_.block; }
  size_t encoded_bytes(size_t numel) const override { return quant::encoded_bytes(format_, numel); }

 private:
  void encode_cpu(const EncodeArgs& args) const override {
    (format_.random ? encode_all<true> : encode_all<false>)(format_, args);
    const size_t offset = codes_offset(format_, args.in.size);
    zero_padding(args.out, offset + (args.in.size * format_.bits + 7) / 8);
  }
  void decode_cpu(Span<const uint8_t> payload, Span<float> out, bool add) const override {
    (add ? decode_all<true> : decode_all<false>)(format_, payload, out);
  }
  void encode_cuda(const EncodeArgs& args) const override {
    launch_encode("quant", coder_name(format_, format_.random), format_.block,
                  codes_offset(format_, args.in.size), args, static_cast<uint32_t>(format_.bits));
  }
  void decode_cuda(Span<const uint8_t> payload, Span<float> out, bool add,
                   const Stream& stream) const override {
    launch_decode("quant", coder_name(format_, false), format_.block,
                  codes_offset(format_, out.size), payload, out, add, stream,
                  static_cast<uint32_t>(format_.bits));
  }

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
  format.random = options.choice("rounding", {kRoundings[0], kRoundings[1]}, 0) == 1;
  options.finish();
  return std::make_unique<Quant>(format);
}

}  // namespace pycomm::codecs::quant
