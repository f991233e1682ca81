// ternary on the CPU: plain loops over ternary.h, compiled for several x86 levels.
#include "codecs/ternary.h"

#include "codecs/base/bits.h"
#include "codecs/base/block_launch.h"
#include "codecs/base/loops.h"
#include "codecs/base/registry.h"
#include "core/error.h"

namespace pycomm::codecs::ternary {
namespace {

/// Scales and codes, for encode_blocks.
template <bool kSum>
struct Writer {
  Format format;
  const float* amax;
  float* scales;
  Packer codes;
  RandomKey key;
  uint64_t index;

  PYCOMM_INLINE Scale scale(size_t block, const float*, size_t) const {
    const Scale shared = shared_scale(amax[block]);
    scales[block] = shared.unit;
    return shared;
  }
  PYCOMM_INLINE Scale scale(size_t block, const float* __restrict x,
                            const float* __restrict residual, size_t n, float* __restrict p) const {
    for (size_t i = 0; i < n; i++) p[i] = x[i] + residual[i];
    return scale(block, p, n);
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
  template <bool kFeedback>
  PYCOMM_INLINE void write_block(size_t lo, const float* __restrict p, size_t n, Scale s,
                                 float* __restrict new_residual) const {
    alignas(64) uint32_t words[kSum ? 1 : kMaxBlock];
    if (!kSum) random_block(key, index + lo, n, words);
    const int top = quant::top(format.bits);
    uint8_t* __restrict q = codes.at(lo);
    for (size_t i = 0; i < n; i++) {
      const int code = kSum ? quantize_sum(p[i], s, top) : quantize(p[i], s, words[i]);
      q[i] = static_cast<uint8_t>(code);
      if (kFeedback) new_residual[i] = p[i] - dequantize(code, s.unit);
    }
    codes.written(lo + n);
  }
};

template <bool kSum>
PYCOMM_SIMD void encode_all(const Format& f, const EncodeArgs& args) {
  RandomKey key = args.key;
  key.seed = rank_seed(key.seed, key.step, key.tensor, key.rank);
  auto* scales = reinterpret_cast<float*>(args.out.data);
  alignas(64) uint8_t tile[kMaxBlock];
  const Packer codes{f.bits, args.in.size, args.out.data + codes_offset(f, args.in.size), tile};
  encode_blocks(args, f.block, Writer<kSum>{f, args.amax, scales, codes, key, args.index});
}

template <bool kAdd>
PYCOMM_SIMD void decode_all(const Format& f, Span<const uint8_t> payload, Span<float> out) {
  alignas(64) uint8_t tile[kMaxBlock];
  const auto* scales = reinterpret_cast<const float*>(payload.data);
  const Unpacker codes{f.bits, out.size, payload.data + codes_offset(f, out.size), tile};
  const int sign = 1 << (f.bits - 1);
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

PYCOMM_SIMD void measure_all(uint32_t block, Span<const float> in, const float* residual,
                             float* out) {
  alignas(64) float p[kMaxBlock];
  for (size_t lo = 0; lo < in.size; lo += block) {
    const size_t n = in.size - lo < block ? in.size - lo : block;
    const float* x = in.data + lo;
    *out++ = measured(residual ? add_max_magnitude(x, residual + lo, n, p) : max_magnitude(x, n));
  }
}

// ---------------------------------------------------- launches in CUDA (ternary.cu)

/// The scales of the arguments are the destination of the measures.
void measure_cuda(const Format& format, Span<const float> in, const float* residual, float* out,
                  const Stream& stream) {
  EncodeParams params{};
  params.in = in.data;
  params.residual = residual;
  params.scales = out;
  params.numel = in.size;
  params.block_bits = __builtin_ctz(format.block);
  const int rows = rows_of(format.block);
  launch("ternary", kernel_name("ternary::measure_kernel", rows), params, in.size,
         rows * cuda::kRow, stream);
}

void encode_cuda(const Format& format, const EncodeArgs& args) {
  const RandomKey& key = args.key;
  EncodeParams params = encode_params(format.block, codes_offset(format, args.in.size), args);
  params.seed = rank_seed(key.seed, key.step, key.tensor, key.rank);
  params.amax = args.amax;
  params.options = static_cast<uint32_t>(format.bits);
  launch("ternary", kernel_name("ternary::encode_kernel", args.summed, args.residual != nullptr),
         params, args.in.size, kSmall * cuda::kRow, args.stream);
}

void decode_cuda(const Format& format, Span<const uint8_t> payload, Span<float> out, bool add,
                 const Stream& stream) {
  DecodeParams params = decode_params(format.block, codes_offset(format, out.size), payload, out);
  params.options = static_cast<uint32_t>(format.bits);
  launch("ternary", kernel_name("ternary::decode_kernel", add), params, out.size,
         kSmall * cuda::kRow, stream);
}

class Ternary final : public Codec {
 public:
  explicit Ternary(const Format& format) : format_(format) {}

  std::string_view name() const override { return "ternary"; }
  std::string spec() const override {
    return "ternary:ranks=" + std::to_string(format_.ranks) +
           ",block=" + std::to_string(format_.block);
  }
  Combine combine() const override { return Combine::sum; }
  int wire_version() const override { return kWireVersion; }
  size_t granule() const override { return format_.block; }
  size_t encoded_bytes(size_t numel) const override {
    return ternary::encoded_bytes(format_, numel);
  }
  bool needs_amax() const override { return true; }

  void compute_amax(Span<const float> in, const float* residual, Span<float> out,
                    Stream stream) const override {
    if (out.size != num_blocks(in.size, format_.block)) {
      throw Error(spec() + ": " + std::to_string(in.size) + " values have " +
                  std::to_string(num_blocks(in.size, format_.block)) +
                  " measures, but the output has room for " + std::to_string(out.size));
    }
    if (stream.device == Device::cuda) {
      return measure_cuda(format_, in, residual, out.data, stream);
    }
    measure_all(format_.block, in, residual, out.data);
  }
  void encode(const EncodeArgs& args) const override {
    check_encode(*this, args);
    if (args.key.ranks > static_cast<uint32_t>(format_.ranks)) {
      throw Error(spec() + ": its codes hold no sum of " + std::to_string(args.key.ranks) +
                  " ranks: use ranks=" + std::to_string(args.key.ranks));
    }
    if (args.stream.device == Device::cuda) return encode_cuda(format_, args);
    (args.summed ? encode_all<true> : encode_all<false>)(format_, args);
    const size_t used = (args.in.size * format_.bits + 7) / 8;
    zero_padding(args.out, codes_offset(format_, args.in.size) + used);
  }
  void decode(Span<const uint8_t> payload, Span<float> out, Stream stream) const override {
    decode<false>(payload, out, stream);
  }
  void decode_add(Span<const uint8_t> payload, Span<float> out, Stream stream) const override {
    decode<true>(payload, out, stream);
  }

 private:
  template <bool kAdd>
  void decode(Span<const uint8_t> payload, Span<float> out, Stream stream) const {
    check_decode(*this, payload, out);
    if (stream.device == Device::cuda) return decode_cuda(format_, payload, out, kAdd, stream);
    decode_all<kAdd>(format_, payload, out);
  }

  Format format_;
};

}  // namespace

std::unique_ptr<Codec> make(Options& options) {
  Format format;
  format.ranks = options.integer("ranks", 7);
  if (format.ranks < 1 || format.ranks > 127) {
    options.fail("ranks=" + std::to_string(format.ranks) + ": use 1 to 127");
  }
  format.bits = 2;
  while (quant::top(format.bits) < format.ranks) format.bits++;
  format.block = block_option(options, kMaxBlock);
  options.finish();
  return std::make_unique<Ternary>(format);
}

}  // namespace pycomm::codecs::ternary
