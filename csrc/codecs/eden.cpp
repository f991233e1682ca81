// eden on the CPU: plain loops over eden.h, compiled for several x86 levels.
#include "codecs/eden.h"

#include <cmath>

#include "codecs/base/bits.h"
#include "codecs/base/block_launch.h"
#include "codecs/base/registry.h"
#include "codecs/rotation/loops.h"
#include "core/error.h"

namespace pycomm::codecs::eden {
namespace {

constexpr size_t kHeaderBytes = sizeof(RotationHeader);

/// Adds each half to the other until one number is left.
PYCOMM_INLINE float add_halves(float* terms, uint32_t n) {
  for (uint32_t width = n / 2; width > 0; width /= 2) {
#pragma GCC ivdep
    for (uint32_t i = 0; i < width; i++) terms[i] = terms[i] + terms[i + width];
  }
  return terms[0];
}

/// Writes the codes of a used rotation; returns its scale.
template <int kBits>
PYCOMM_INLINE float write_block(float* __restrict y, int size_bits, float amax, bool mmse,
                                uint8_t* out) {
  alignas(64) float terms[kMaxRotation];
  alignas(64) float squares[kMaxRotation];
  alignas(64) uint8_t codes[kMaxRotation];
  const uint32_t size = 1u << size_bits;
  const float exponent = exponent_of(amax), shrink = inverse_exponent(exponent);
  for (uint32_t i = 0; i < size; i++) {
    y[i] = y[i] * shrink;
    terms[i] = y[i] * y[i];
  }
  const float energy = add_halves(terms, size);
  const float inv = std::sqrt(static_cast<float>(size) / energy);
  for (uint32_t i = 0; i < size; i++) {
    const Coded coded = quantize<kBits>(y[i], inv);
    codes[i] = static_cast<uint8_t>(coded.code);
    terms[i] = coded.value * y[i];
    squares[i] = coded.value * coded.value;
  }
  for (uint32_t lo = 0; lo < size; lo += kMaxBlock) {
    const uint32_t n = size - lo < kMaxBlock ? size - lo : kMaxBlock;
    pack(kBits, codes + lo, n, out + lo * kBits / 8);
  }
  const float along = add_halves(terms, size);
  return (mmse ? along / add_halves(squares, size) : energy / along) * exponent;
}

/// Implements dequantize() by the code: vectors gather from a table.
template <int kBits>
struct Table {
  constexpr Table() {
    for (uint32_t code = 0; code <= kMask; code++) {
      const float value = level(kBits, static_cast<int>(code & (kMask >> 1)));
      values[code] = code > kMask >> 1 ? -value : value;
    }
  }
  PYCOMM_INLINE float operator[](uint32_t code) const { return values[code & kMask]; }

  static constexpr uint32_t kMask = (1u << kBits) - 1;
  alignas(64) float values[kMask + 1] = {};
};
template <int kBits>
constexpr Table<kBits> kTable;

template <int kBits>
PYCOMM_INLINE void read_block(const uint8_t* in, float scale, int size_bits, float* __restrict y) {
  alignas(64) uint8_t codes[kMaxRotation];
  const uint32_t size = 1u << size_bits;
  const Table<kBits>& table = kTable<kBits>;
  for (uint32_t lo = 0; lo < size; lo += kMaxBlock) {
    const uint32_t n = size - lo < kMaxBlock ? size - lo : kMaxBlock;
    unpack(kBits, in + lo * kBits / 8, n, codes + lo);
  }
  for (uint32_t i = 0; i < size; i++) {
    // With two levels the choice is faster than the table.
    const float value = kBits <= 2 ? dequantize<kBits>(codes[i]) : table[codes[i]];
    y[i] = value * scale;
  }
}

template <int kBits>
PYCOMM_SIMD void encode_all(const Format& f, const EncodeArgs& args) {
  alignas(64) float y[kMaxRotation];
  const size_t size = size_t{1} << f.size_bits;
  const RotationHeader header{rotation_key(args.key.seed, args.key.step, args.key.tensor),
                              args.index / kSignsPerWord};
  std::memcpy(args.out.data, &header, kHeaderBytes);
  auto* scales = reinterpret_cast<float*>(args.out.data + kHeaderBytes);
  uint8_t* codes = args.out.data + codes_offset(f, args.in.size);
  for (size_t lo = 0; lo < args.in.size; lo += size, codes += code_bytes(f)) {
    const size_t n = args.in.size - lo < size ? args.in.size - lo : size;
    const float* x = args.in.data + lo;
    const float* residual = args.residual ? args.residual + lo : nullptr;
    const RotationSigns signs(header, lo, size);
    rotate_block(signs, x, residual, n, f.size_bits, y);
    const float amax = max_magnitude(y, size);
    float scale = codecs::scale(amax, 1.0f);
    if (used(amax)) {
      scale = write_block<kBits>(y, f.size_bits, amax, f.mmse, codes);
    } else {
      std::memset(codes, 0, code_bytes(f));
    }
    *scales++ = scale;
    if (residual) {
      read_block<kBits>(codes, scale, f.size_bits, y);
      const Sink sink{Then::store_residual, args.new_residual + lo, x, residual};
      unrotate_block(signs, y, n, f.size_bits, sink);
    }
  }
  zero_padding(args.out, static_cast<size_t>(codes - args.out.data));
}

template <int kBits>
PYCOMM_SIMD void decode_all(const Format& f, Span<const uint8_t> payload, Span<float> out,
                            Then then) {
  alignas(64) float y[kMaxRotation];
  const size_t size = size_t{1} << f.size_bits;
  RotationHeader header;
  std::memcpy(&header, payload.data, kHeaderBytes);
  const auto* scales = reinterpret_cast<const float*>(payload.data + kHeaderBytes);
  const uint8_t* codes = payload.data + codes_offset(f, out.size);
  for (size_t lo = 0; lo < out.size; lo += size, codes += code_bytes(f)) {
    const size_t n = out.size - lo < size ? out.size - lo : size;
    read_block<kBits>(codes, *scales++, f.size_bits, y);
    unrotate_block(RotationSigns(header, lo, size), y, n, f.size_bits, {then, out.data + lo});
  }
}

// ---------------------------------------------------- launches in CUDA (eden.cu)

/// Returns the bits of a size that has kernels of its own, else 0.
int known_size(const Format& format) {
  return format.size_bits == 7 || format.size_bits == 10 ? format.size_bits : 0;
}

void encode_cuda(const Format& format, const EncodeArgs& args) {
  EncodeParams params = encode_params(1, codes_offset(format, args.in.size), args);
  params.header = reinterpret_cast<uint32_t*>(args.out.data);
  params.scales = reinterpret_cast<float*>(args.out.data + kHeaderBytes);
  params.key = rotation_key(args.key.seed, args.key.step, args.key.tensor);
  params.rotation_bits = format.size_bits;
  launch("eden", kernel_name("eden::encode_kernel", format.bits, known_size(format), format.mmse),
         params, args.in.size, kTile, args.stream);
}

void decode_cuda(const Format& format, Span<const uint8_t> payload, Span<float> out, bool add,
                 const Stream& stream) {
  DecodeParams params = decode_params(1, codes_offset(format, out.size), payload, out);
  params.header = reinterpret_cast<const uint32_t*>(payload.data);
  params.scales = reinterpret_cast<const float*>(payload.data + kHeaderBytes);
  params.rotation_bits = format.size_bits;
  params.add = add;
  launch("eden", kernel_name("eden::decode_kernel", format.bits, known_size(format)), params,
         out.size, kTile, stream);
}

class Eden final : public Codec {
 public:
  explicit Eden(const Format& format) : format_(format) {}

  std::string_view name() const override { return "eden"; }
  std::string spec() const override {
    return "eden:bits=" + std::to_string(format_.bits) +
           ",size=" + std::to_string(1 << format_.size_bits) +
           ",scale=" + (format_.mmse ? "mmse" : "unbiased");
  }
  Combine combine() const override { return Combine::recode; }
  int wire_version() const override { return kWireVersion; }
  bool fuses_residual() const override { return true; }
  size_t granule() const override { return size_t{1} << format_.size_bits; }
  size_t encoded_bytes(size_t numel) const override { return eden::encoded_bytes(format_, numel); }

  void encode(const EncodeArgs& args) const override {
    check_encode(*this, args);
    if (args.in.size == 0) return;
    if (args.stream.device == Device::cuda) return encode_cuda(format_, args);
    with_bits(format_, [&](auto bits) { encode_all<bits>(format_, args); });
  }
  void decode(Span<const uint8_t> payload, Span<float> out, Stream stream,
              bool add) const override {
    check_decode(*this, payload, out);
    if (out.size == 0) return;
    if (stream.device == Device::cuda) return decode_cuda(format_, payload, out, add, stream);
    const Then then = add ? Then::add : Then::store;
    with_bits(format_, [&](auto bits) { decode_all<bits>(format_, payload, out, then); });
  }

 private:
  Format format_;
};

}  // namespace

std::unique_ptr<Codec> make(Options& options) {
  Format format;
  format.bits = options.integer("bits", 2);
  if (format.bits < 1 || format.bits > 4) {
    options.fail("bits=" + std::to_string(format.bits) + ": use 1, 2, 3 or 4");
  }
  const int size = options.integer("size", 1024);
  const bool power = size > 0 && (size & (size - 1)) == 0;
  if (!power || size < static_cast<int>(kMinRotation) || size > static_cast<int>(kMaxRotation)) {
    options.fail("size=" + std::to_string(size) + ": use a power of two from 32 to 4096");
  }
  format.size_bits = __builtin_ctz(static_cast<unsigned>(size));
  format.mmse = options.choice("scale", {"unbiased", "mmse"}, 0) == 1;
  options.finish();
  return std::make_unique<Eden>(format);
}

}  // namespace pycomm::codecs::eden
