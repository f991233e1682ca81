// lossless on the CPU.
#include "codecs/lossless.h"

#include <algorithm>

#include "codecs/bits.h"
#include "codecs/loops.h"
#include "codecs/options.h"
#include "codecs/registry.h"
#include "core/error.h"

namespace pycomm::codecs::lossless {
namespace {

/// Codes of a block and as many escaped exponents.
constexpr size_t kLargestPart = 2 * kBlock;

/// The exponents of one block on the wire: its largest, the bits of an offset, its part of the
/// stream.
struct Part {
  uint8_t top;
  uint8_t width;
  size_t size;
  alignas(64) uint8_t bytes[kLargestPart];
};

PYCOMM_INLINE uint8_t escape_of(uint32_t width) { return static_cast<uint8_t>((1u << width) - 1); }

/// The width with the fewest bits, the smallest of equals.
PYCOMM_INLINE uint8_t best_width(const uint8_t* __restrict offset, size_t n) {
  uint32_t any = 0;
  for (size_t i = 0; i < n; i++) any |= offset[i];
  if (any == 0) return 0;
  uint8_t best = kRaw;
  size_t least = 8 * n;
  for (uint32_t width = kRaw - 1; width >= 2; width--) {
    const uint8_t escape = escape_of(width);
    uint32_t escaped = 0;
    for (size_t i = 0; i < n; i++) escaped += offset[i] >= escape;
    const size_t bits = width * n + 8 * size_t{escaped};
    if (bits <= least) {
      least = bits;
      best = static_cast<uint8_t>(width);
    }
  }
  return best;
}

PYCOMM_INLINE void encode_exponents(const uint8_t* __restrict exponent, size_t n, Part& part) {
  alignas(64) uint8_t offset[kBlock];
  alignas(64) uint8_t code[kBlock];
  uint8_t top = 0;
  for (size_t i = 0; i < n; i++) top = exponent[i] > top ? exponent[i] : top;
  for (size_t i = 0; i < n; i++) offset[i] = static_cast<uint8_t>(top - exponent[i]);
  part.top = top;
  part.width = best_width(offset, n);
  part.size = 0;
  if (part.width == 0) return;
  if (part.width == kRaw) {
    std::memcpy(part.bytes, exponent, n);
    part.size = n;
    return;
  }
  const uint8_t escape = escape_of(part.width);
  for (size_t i = 0; i < n; i++) code[i] = offset[i] < escape ? offset[i] : escape;
  pack(part.width, code, n, part.bytes);
  part.size = (n * part.width + 7) / 8;
  // Written for all, kept for those that are escaped: no jumps.
  uint8_t* to = part.bytes + part.size;
  for (size_t i = 0; i < n; i++) {
    *to = exponent[i];
    to += offset[i] >= escape;
  }
  part.size = static_cast<size_t>(to - part.bytes);
}

/// Reads the stream; behind its end there are bytes of ones.
class Stream {
 public:
  Stream(const uint8_t* from, size_t size) : from_(from), left_(size) {}

  /// The next kLargestPart bytes, of which `take` says how many were read.
  const uint8_t* peek() {
    if (left_ >= kLargestPart) return from_;
    std::memcpy(end_, from_, left_);
    std::memset(end_ + left_, 0xff, kLargestPart - left_);
    return end_;
  }
  void take(size_t bytes) {
    bytes = std::min(bytes, left_);
    from_ += bytes;
    left_ -= bytes;
  }

 private:
  const uint8_t* from_;
  size_t left_;
  uint8_t end_[kLargestPart];
};

PYCOMM_INLINE void decode_exponents(uint8_t top, uint32_t width, Stream& stream, size_t n,
                                    uint8_t* __restrict exponent) {
  if (width == 0) {
    std::memset(exponent, top, n);
    return;
  }
  const uint8_t* from = stream.peek();
  if (width == 1 || width >= kRaw) {  // 1 is never written
    std::memcpy(exponent, from, n);
    stream.take(n);
    return;
  }
  alignas(64) uint8_t code[kBlock];
  unpack(static_cast<int>(width), from, n, code);
  const uint8_t escape = escape_of(width);
  uint32_t escaped = 0;
  for (size_t i = 0; i < n; i++) escaped += code[i] == escape;
  for (size_t i = 0; i < n; i++) exponent[i] = static_cast<uint8_t>(top - code[i]);
  const uint8_t* next = from + (n * width + 7) / 8;
  if (escaped > 0) {
    for (size_t i = 0; i < n; i++) {
      exponent[i] = code[i] == escape ? *next : exponent[i];
      next += code[i] == escape;
    }
  }
  stream.take(static_cast<size_t>(next - from));
}

template <bool kWide, bool kFeedback>
PYCOMM_SIMD void encode_all(const EncodeArgs& args) {
  const Layout at(args.in.size, kWide);
  uint8_t* out = args.out.data;
  uint8_t* stream = out + at.stream;
  // The padding of each section of fixed size is in its last word.
  for (size_t end : {at.low, at.blocks, at.stream}) std::memset(out + end - 4, 0, 4);
  alignas(64) uint32_t bits[kBlock];
  alignas(64) uint8_t exponent[kBlock];
  Part part;
  for (size_t lo = 0; lo < args.in.size; lo += kBlock) {
    const size_t n = std::min<size_t>(kBlock, args.in.size - lo);
    const float* x = args.in.data + lo;
    const float* residual = args.residual + (kFeedback ? lo : 0);
    float* owes = args.new_residual + (kFeedback ? lo : 0);
    for (size_t i = 0; i < n; i++) {
      const float p = kFeedback ? x[i] + residual[i] : x[i];
      bits[i] = kWide ? wide_bits(p) : short_bits(p);
      if (kFeedback) owes[i] = owed(p, bits_float(bits[i]), residual[i]);
    }
    uint8_t* __restrict high = out + at.high + lo;
    for (size_t i = 0; i < n; i++) {
      high[i] = static_cast<uint8_t>((bits[i] >> 24 & 0x80) | (bits[i] >> 16 & 0x7f));
    }
    if (kWide) {
      auto* __restrict low = reinterpret_cast<uint16_t*>(out + at.low) + lo;
      for (size_t i = 0; i < n; i++) low[i] = static_cast<uint16_t>(bits[i]);
    }
    for (size_t i = 0; i < n; i++) exponent[i] = static_cast<uint8_t>(bits[i] >> 23);
    encode_exponents(exponent, n, part);
    out[at.blocks + lo / kBlock * 2] = part.top;
    out[at.blocks + lo / kBlock * 2 + 1] = part.width;
    std::memcpy(stream, part.bytes, part.size);
    stream += part.size;
  }
  const size_t used = padded(static_cast<size_t>(stream - out));
  std::memset(stream, 0, static_cast<size_t>(out + args.out.size - stream));
  const auto header = static_cast<uint32_t>(used);
  std::memcpy(out, &header, sizeof header);
}

template <bool kWide, bool kAdd>
PYCOMM_SIMD void decode_all(Span<const uint8_t> payload, Span<float> out) {
  const Layout at(out.size, kWide);
  uint32_t used;
  std::memcpy(&used, payload.data, sizeof used);
  const size_t end = std::max(at.stream, std::min<size_t>(used, payload.size));
  Stream stream(payload.data + at.stream, end - at.stream);
  alignas(64) uint8_t exponent[kBlock];
  for (size_t lo = 0; lo < out.size; lo += kBlock) {
    const size_t n = std::min<size_t>(kBlock, out.size - lo);
    const uint8_t* block = payload.data + at.blocks + lo / kBlock * 2;
    decode_exponents(block[0], block[1], stream, n, exponent);
    const uint8_t* __restrict high = payload.data + at.high + lo;
    const auto* __restrict low = reinterpret_cast<const uint16_t*>(payload.data + at.low) + lo;
    float* __restrict to = out.data + lo;
    for (size_t i = 0; i < n; i++) {
      const uint32_t sign_mantissa = (high[i] & 0x80u) << 24 | (high[i] & 0x7fu) << 16;
      const uint32_t rest = kWide ? low[i] : 0;
      const float value = bits_float(sign_mantissa | uint32_t{exponent[i]} << 23 | rest);
      to[i] = kAdd ? to[i] + value : value;
    }
  }
}

class Lossless final : public Codec {
 public:
  explicit Lossless(bool wide) : wide_(wide) {}

  std::string_view name() const override { return "lossless"; }
  std::string spec() const override {
    return wide_ ? "lossless:dtype=float32" : "lossless:dtype=bfloat16";
  }
  Combine combine() const override { return Combine::recode; }
  int wire_version() const override { return kWireVersion; }
  size_t granule() const override { return kBlock; }
  bool variable() const override { return true; }
  size_t encoded_bytes(size_t numel) const override {
    return numel == 0 ? 0 : Layout(numel, wide_).bytes;
  }

  void encode(const EncodeArgs& args) const override {
    check_encode(*this, args);
    check_place(args.out.size, args.stream);
    if (args.in.size == 0) return;
    if (args.residual) {
      (wide_ ? encode_all<true, true> : encode_all<false, true>)(args);
    } else {
      (wide_ ? encode_all<true, false> : encode_all<false, false>)(args);
    }
  }
  void decode(Span<const uint8_t> payload, Span<float> out, pycomm::Stream stream) const override {
    check_decode(*this, payload, out);
    check_place(payload.size, stream);
    if (out.size == 0) return;
    (wide_ ? decode_all<true, false> : decode_all<false, false>)(payload, out);
  }
  void decode_add(Span<const uint8_t> payload, Span<float> out,
                  pycomm::Stream stream) const override {
    check_decode(*this, payload, out);
    check_place(payload.size, stream);
    if (out.size == 0) return;
    (wide_ ? decode_all<true, true> : decode_all<false, true>)(payload, out);
  }

 private:
  void check_place(size_t bytes, pycomm::Stream stream) const {
    if (stream.device == Device::cuda) throw Error(spec() + ": it has no CUDA kernels");
    if (bytes > UINT32_MAX) {
      throw Error(spec() + ": a payload counts its bytes in 32 bits; cut the tensor");
    }
  }

  bool wide_;
};

}  // namespace

std::unique_ptr<Codec> make(Options& options) {
  const bool wide = options.choice("dtype", {"float32", "bfloat16"}, 0) == 0;
  options.finish();
  return std::make_unique<Lossless>(wide);
}

}  // namespace pycomm::codecs::lossless
