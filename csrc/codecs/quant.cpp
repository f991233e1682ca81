// quant on the CPU: plain loops over quant.h, compiled for several x86 levels.
#include "codecs/quant.h"

#include "codecs/cuda.h"
#include "codecs/loops.h"
#include "codecs/options.h"
#include "codecs/registry.h"

namespace pycomm::codecs::quant {
namespace {

/// random_words() of a whole block: round after round over arrays, since gcc vectorises that with
/// half the multiplications (measured: 1.2 to 1.4 times faster than group after group).
PYCOMM_INLINE void random_block(const RandomKey& key, uint64_t index, size_t n,
                                uint32_t* __restrict words) {
  alignas(64) uint32_t c[4][kMaxBlock / 4];
  const size_t groups = (n + 3) / 4;
  for (size_t g = 0; g < groups; g++) {
    const uint64_t group = index / 4 + g;
    c[0][g] = static_cast<uint32_t>(group);
    c[1][g] = static_cast<uint32_t>(group >> 32);
    c[2][g] = key.tensor;
    c[3][g] = key.step;
  }
  auto key0 = static_cast<uint32_t>(key.seed);
  auto key1 = static_cast<uint32_t>(key.seed >> 32);
  for (int round = 0; round < kPhiloxRounds; round++) {
    for (size_t g = 0; g < groups; g++) {
      const Random4 four = philox_round({{c[0][g], c[1][g], c[2][g], c[3][g]}}, key0, key1);
      c[0][g] = four.word[0];
      c[1][g] = four.word[1];
      c[2][g] = four.word[2];
      c[3][g] = four.word[3];
    }
    key0 += kPhiloxKey0;
    key1 += kPhiloxKey1;
  }
  for (size_t g = 0; g < groups; g++) {
    words[4 * g] = c[0][g];
    words[4 * g + 1] = c[1][g];
    words[4 * g + 2] = c[2][g];
    words[4 * g + 3] = c[3][g];
  }
}

/// Two codes of 4 bits per byte. Pairs are read as 16 bits, which packs without shuffles.
PYCOMM_INLINE void pack_block(const uint16_t* __restrict pairs, size_t bytes,
                              uint8_t* __restrict out) {
  for (size_t i = 0; i < bytes; i++) {
    out[i] = static_cast<uint8_t>((pairs[i] & 15) | ((pairs[i] >> 4) & 0xf0));
  }
}

PYCOMM_INLINE void unpack_block(const uint8_t* __restrict in, size_t bytes,
                                uint16_t* __restrict pairs) {
  for (size_t i = 0; i < bytes; i++) {
    pairs[i] = static_cast<uint16_t>((in[i] & 15) | (in[i] & 0xf0) << 4);
  }
}

template <int kBits, bool kStochastic>
struct Writer {
  uint8_t* codes;
  RandomKey key;
  uint64_t index;

  PYCOMM_INLINE void write(size_t lo, const float* p, size_t n, float s, float inv) const {
    write_block<false>(lo, p, n, s, inv, nullptr);
  }
  PYCOMM_INLINE void write(size_t lo, const float* p, size_t n, float s, float inv,
                           float* owed) const {
    write_block<true>(lo, p, n, s, inv, owed);
  }
  PYCOMM_INLINE void zero(size_t lo, size_t n) const {
    std::memset(codes + lo * kBits / 8, 0, (n * kBits + 7) / 8);
  }

 private:
  template <bool kFeedback>
  PYCOMM_INLINE void write_block(size_t lo, const float* __restrict p, size_t n, float s, float inv,
                                 float* __restrict owed) const {
    alignas(64) uint32_t words[kStochastic ? kMaxBlock : 1];
    alignas(64) uint16_t pairs[kBits == 4 ? kMaxBlock / 2 : 1];
    if (kStochastic) random_block(key, index + lo, n, words);
    if (kBits == 4) pairs[(n - 1) / 2] = 0;
    int8_t* __restrict q =
        kBits == 4 ? reinterpret_cast<int8_t*>(pairs) : reinterpret_cast<int8_t*>(codes + lo);
    for (size_t i = 0; i < n; i++) {
      const int code =
          kStochastic ? quantize(p[i], inv, words[i], top(kBits)) : quantize(p[i], inv);
      q[i] = static_cast<int8_t>(code);
      if (kFeedback) owed[i] = p[i] - dequantize(code, s);
    }
    if (kBits == 4) pack_block(pairs, (n + 1) / 2, codes + lo / 2);
  }
};

template <int kBits, bool kStochastic>
PYCOMM_SIMD void encode_all(const Format& f, const EncodeArgs& args) {
  uint8_t* codes = args.out.data + codes_offset(f, args.in.size);
  encode_blocks(args, f.block, static_cast<float>(top(kBits)),
                Writer<kBits, kStochastic>{codes, args.key, args.index});
}

template <int kBits, bool kAdd>
PYCOMM_SIMD void decode_all(const Format& f, Span<const uint8_t> payload, Span<float> out) {
  alignas(64) uint16_t pairs[kBits == 4 ? kMaxBlock / 2 : 1];
  const auto* scales = reinterpret_cast<const float*>(payload.data);
  const uint8_t* codes = payload.data + codes_offset(f, out.size);
  for (size_t lo = 0; lo < out.size; lo += f.block) {
    const size_t n = out.size - lo < f.block ? out.size - lo : f.block;
    const float s = *scales++;
    float* __restrict to = out.data + lo;
    if (kBits == 4) {
      unpack_block(codes + lo / 2, (n + 1) / 2, pairs);
      const uint8_t* __restrict q = reinterpret_cast<const uint8_t*>(pairs);
      for (size_t i = 0; i < n; i++) {
        const float value = dequantize(unpack4(q[i]), s);
        to[i] = kAdd ? to[i] + value : value;
      }
    } else {
      const int8_t* __restrict q = reinterpret_cast<const int8_t*>(codes + lo);
      for (size_t i = 0; i < n; i++) {
        const float value = dequantize(q[i], s);
        to[i] = kAdd ? to[i] + value : value;
      }
    }
  }
}

class Quant final : public Codec {
 public:
  explicit Quant(const Format& format) : format_(format) {}

  std::string_view name() const override { return "quant"; }
  std::string spec() const override {
    return "quant:bits=" + std::to_string(format_.bits) +
           ",block=" + std::to_string(format_.block) +
           ",rounding=" + (format_.stochastic ? "stochastic" : "nearest");
  }
  Combine combine() const override { return Combine::recode; }
  int wire_version() const override { return kWireVersion; }
  size_t granule() const override { return format_.block; }
  size_t encoded_bytes(size_t numel) const override { return quant::encoded_bytes(format_, numel); }

  void encode(const EncodeArgs& args) const override {
    check_encode(*this, args);
    if (args.stream.device == Device::cuda) return encode_cuda(format_, args);
    const auto run = format_.bits == 8
                         ? (format_.stochastic ? encode_all<8, true> : encode_all<8, false>)
                         : (format_.stochastic ? encode_all<4, true> : encode_all<4, false>);
    run(format_, args);
    const size_t end = codes_offset(format_, args.in.size) + (args.in.size * format_.bits + 7) / 8;
    zero_padding(args.out, end);
  }
  void decode(Span<const uint8_t> payload, Span<float> out, Stream stream) const override {
    check_decode(*this, payload, out);
    if (stream.device == Device::cuda) return decode_cuda(format_, payload, out, false, stream);
    (format_.bits == 8 ? decode_all<8, false> : decode_all<4, false>)(format_, payload, out);
  }
  void decode_add(Span<const uint8_t> payload, Span<float> out, Stream stream) const override {
    check_decode(*this, payload, out);
    if (stream.device == Device::cuda) return decode_cuda(format_, payload, out, true, stream);
    (format_.bits == 8 ? decode_all<8, true> : decode_all<4, true>)(format_, payload, out);
  }

 private:
  Format format_;
};

}  // namespace

std::unique_ptr<Codec> make(Options& options) {
  Format format;
  format.bits = options.integer("bits", 8);
  if (format.bits != 8 && format.bits != 4) {
    options.fail("bits=" + std::to_string(format.bits) + ": use 8 or 4");
  }
  format.block = block_option(options, format.bits == 8 ? 256 : 128);
  format.stochastic = options.choice("rounding", {"nearest", "stochastic"}, 0) == 1;
  options.finish();
  return std::make_unique<Quant>(format);
}

}  // namespace pycomm::codecs::quant
