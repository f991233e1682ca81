// quant: plain loops over quant.h, compiled for several x86 levels, and the launches of quant.cu.
#include "codecs/quant.h"

#include "codecs/base/block_launch.h"
#include "codecs/base/loops.h"
#include "codecs/base/options.h"

namespace pycomm::codecs::quant {
namespace {

constexpr const char* kRoundings[] = {"nearest", "stochastic"};

BlockCodes codes_of(const Format& f, size_t numel) {
  return {f.block, f.bits, codes_offset(f, numel)};
}

template <bool kRandom, bool kFeedback>
PYCOMM_SIMD void encode_all(const Format& f, const EncodeArgs& args) {
  alignas(64) uint32_t words[kRandom ? kMaxBlock : 1];
  const int limit = top(f.bits);
  encode_blocks<kFeedback>(
      args, codes_of(f, args.in.size), static_cast<float>(limit),
      [&](size_t lo, size_t n) {
        if (kRandom) random_block(args.key, args.index + lo, n, words);
      },
      [&](size_t i, float v) __attribute__((always_inline)) -> Rounded {
        const int q = kRandom ? round_randomly(v, words[i], limit) : round_nearest(v);
        return {static_cast<uint32_t>(q), static_cast<float>(q)};
      });
}

template <bool kAdd>
PYCOMM_SIMD void decode_all(const Format& f, Span<const uint8_t> payload, Span<float> out) {
  const int sign = 1 << (f.bits - 1);
  decode_blocks<kAdd>(payload, out, codes_of(f, out.size),
                      [sign](uint8_t code) __attribute__((always_inline)) {
                        return static_cast<float>((code ^ sign) - sign);
                      });
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
  bool takes_stored(Device) const override { return true; }
  bool fuses_sum() const override { return true; }
  size_t granule() const override { return format_.block; }
  size_t encoded_bytes(size_t numel) const override { return quant::encoded_bytes(format_, numel); }

 private:
  void encode_cpu(const EncodeArgs& args) const override {
    const auto run = args.has_residual()
                         ? (format_.random ? encode_all<true, true> : encode_all<false, true>)
                         : (format_.random ? encode_all<true, false> : encode_all<false, false>);
    run(format_, args);
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
