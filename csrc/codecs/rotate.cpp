// rotate on the CPU: each segment is rotated on the stack and passed to the inner codec. Wire
// format: docs/wire/rotate.md.
#include "codecs/base/registry.h"
#include "codecs/planar.h"
#include "codecs/rotation/launch.h"
#include "codecs/rotation/loops.h"
#include "codecs/rotation/options.h"
#include "core/error.h"

namespace pycomm::codecs::rotate {
namespace {

/// Wire version; it is raised with that of every inner codec, too.
constexpr int kWireVersion = 2;
constexpr size_t kHeaderBytes = sizeof(RotationHeader);
/// Values of a segment: blocks of the rotation and of the inner codec both divide it.
constexpr size_t kSegment = 4096;
/// Largest payload of a segment: enough for float32 with two scales for every 32 values.
constexpr size_t kSegmentBytes = kSegment * 4 + kSegment / 32 * 8;

/// Computes y = the rotation of the n values from `first` on, block after block.
PYCOMM_SIMD void rotate_segment(const RotationHeader& header, size_t first, const float* x,
                                const float* residual, size_t n, int size_bits, float* y) {
  const size_t size = size_t{1} << size_bits;
  for (size_t lo = 0; lo < n; lo += size) {
    const RotationSigns signs(header, first + lo, size);
    const size_t there = n - lo < size ? n - lo : size;
    rotate_block(signs, x + lo, residual ? residual + lo : nullptr, there, size_bits, y + lo);
  }
}

PYCOMM_SIMD void unrotate_segment(const RotationHeader& header, size_t first, float* y, size_t n,
                                  int size_bits, const Sink& sink) {
  const size_t size = size_t{1} << size_bits;
  for (size_t lo = 0; lo < n; lo += size) {
    const RotationSigns signs(header, first + lo, size);
    const size_t there = n - lo < size ? n - lo : size;
    unrotate_block(signs, y + lo, there, size_bits, sink.from(lo));
  }
}

// ---------------------------------------------------- launches in CUDA (rotate.cu)

/// The facts about an inner codec that kernels need.
struct Inner {
  std::string type;    ///< its name in the kernel's
  uint32_t block = 1;  ///< 1: it has no blocks
  uint32_t options = 0;
  uint32_t shift = 0;
};

Inner inner_of(const cast::Format& f, const RandomKey&) {
  const std::string type = cast::type_name(f.kind);
  if (f.block == 0) return {kernel_name("rotate::Plain", type)};
  return {kernel_name("rotate::Blocks", cast::coder_name(type)), f.block};
}
Inner inner_of(const quant::Format& f, const RandomKey& key) {
  return {kernel_name("rotate::Quant", f.rounding != quant::Rounding::nearest), f.block,
          quant::options_of(f), quant::rank_shift(f.rounding, key.rank, key.ranks)};
}
Inner inner_of(const sign::Format& f, const RandomKey&) { return {"rotate::Sign", f.block}; }

void encode_cuda(int size_bits, const PlanarCodec& codec, const EncodeArgs& args) {
  const Inner inner =
      std::visit([&](const auto& f) { return inner_of(f, args.key); }, codec.format());
  const size_t offset = codec.codes_offset(rotated_values(args.in.size, size_bits));
  EncodeParams params = rotation_params(size_bits, inner.block, offset, args);
  params.options = inner.options;
  params.shift = inner.shift;
  launch("rotate", kernel_name("rotate::encode_kernel", inner.type), params, args.in.size, kTile,
         args.stream);
}

void decode_cuda(int size_bits, const PlanarCodec& codec, Span<const uint8_t> payload,
                 Span<float> out, bool add, const Stream& stream) {
  PlanarFormat format = codec.format();
  // Codes mean the same for every rounding.
  if (auto* quant = std::get_if<quant::Format>(&format)) quant->rounding = quant::Rounding::nearest;
  const Inner inner = std::visit([&](const auto& f) { return inner_of(f, {}); }, format);
  const size_t offset = codec.codes_offset(rotated_values(out.size, size_bits));
  DecodeParams params = rotation_params(size_bits, inner.block, offset, payload, out, add);
  params.options = inner.options;
  launch("rotate", kernel_name("rotate::decode_kernel", inner.type), params, out.size, kTile,
         stream);
}

class Rotate final : public Codec {
 public:
  Rotate(int size_bits, std::unique_ptr<PlanarCodec> inner)
      : size_bits_(size_bits), inner_(std::move(inner)) {}

  std::string_view name() const override { return "rotate"; }
  std::string spec() const override {
    return "rotate:size=" + std::to_string(size()) + "+" + inner_->spec();
  }
  Combine combine() const override { return Combine::recode; }
  int wire_version() const override { return kWireVersion; }
  bool shared_seed() const override { return inner_->shared_seed(); }
  size_t granule() const override {
    return size() > inner_->granule() ? size() : inner_->granule();
  }
  size_t encoded_bytes(size_t numel) const override {
    return numel == 0 ? 0 : kHeaderBytes + inner_->encoded_bytes(rotated(numel));
  }

  void encode(const EncodeArgs& args) const override {
    check_encode(*this, args);
    if (args.in.size == 0) return;
    if (args.stream.device == Device::cuda) return encode_cuda(size_bits_, *inner_, args);
    const RandomKey& key = args.key;
    const RotationHeader header{rotation_key(key.seed, key.step, key.tensor),
                                args.index / kSignsPerWord};
    std::memcpy(args.out.data, &header, kHeaderBytes);
    alignas(64) float y[kSegment];
    alignas(64) uint8_t piece[kSegmentBytes];
    for (size_t lo = 0; lo < args.in.size; lo += kSegment) {
      const size_t n = args.in.size - lo < kSegment ? args.in.size - lo : kSegment;
      const float* x = args.in.data + lo;
      const float* residual = args.residual ? args.residual + lo : nullptr;
      rotate_segment(header, lo, x, residual, n, size_bits_, y);
      EncodeArgs inner;
      inner.in = {y, rotated(n)};
      inner.out = {piece, inner_->encoded_bytes(rotated(n))};
      inner.key = args.key;
      inner.index = args.index + lo;
      inner_->encode(inner);
      for_sections(args.in.size, lo, n, [&](size_t whole, size_t part, size_t bytes) {
        std::memcpy(args.out.data + whole, piece + part, bytes);
      });
      if (residual) {
        inner_->decode(inner.out, {y, rotated(n)}, args.stream);
        const Sink sink{Then::store_residual, args.new_residual + lo, x, residual};
        unrotate_segment(header, lo, y, n, size_bits_, sink);
      }
    }
  }
  void decode(Span<const uint8_t> payload, Span<float> out, Stream stream) const override {
    decode_then(Then::store, payload, out, stream);
  }
  void decode_add(Span<const uint8_t> payload, Span<float> out, Stream stream) const override {
    decode_then(Then::add, payload, out, stream);
  }

 private:
  size_t size() const { return size_t{1} << size_bits_; }
  size_t rotated(size_t numel) const { return rotated_values(numel, size_bits_); }

  /// Calls f(place in the payload, place in the piece, bytes) for the two sections of the segment
  /// of n values at `lo`.
  template <typename F>
  void for_sections(size_t numel, size_t lo, size_t n, F&& f) const {
    const size_t codes = inner_->codes_offset(rotated(n));
    f(kHeaderBytes + inner_->codes_offset(lo), 0, codes);
    const size_t before = inner_->encoded_bytes(lo) - inner_->codes_offset(lo);
    f(kHeaderBytes + inner_->codes_offset(rotated(numel)) + before, codes,
      inner_->encoded_bytes(rotated(n)) - codes);
  }

  void decode_then(Then then, Span<const uint8_t> payload, Span<float> out, Stream stream) const {
    check_decode(*this, payload, out);
    if (out.size == 0) return;
    if (stream.device == Device::cuda) {
      return decode_cuda(size_bits_, *inner_, payload, out, then == Then::add, stream);
    }
    RotationHeader header;
    std::memcpy(&header, payload.data, kHeaderBytes);
    alignas(64) float y[kSegment];
    alignas(64) uint8_t piece[kSegmentBytes];
    for (size_t lo = 0; lo < out.size; lo += kSegment) {
      const size_t n = out.size - lo < kSegment ? out.size - lo : kSegment;
      for_sections(out.size, lo, n, [&](size_t whole, size_t part, size_t bytes) {
        std::memcpy(piece + part, payload.data + whole, bytes);
      });
      inner_->decode({piece, inner_->encoded_bytes(rotated(n))}, {y, rotated(n)}, stream);
      unrotate_segment(header, lo, y, n, size_bits_, {then, out.data + lo});
    }
  }

  int size_bits_;
  std::unique_ptr<PlanarCodec> inner_;
};

}  // namespace

std::unique_ptr<Codec> make(Options& options) {
  const int size_bits = rotation_option(options);
  const std::string inner = options.inner("quant:bits=4");
  options.finish();
  std::unique_ptr<Codec> codec = make_codec(inner);
  auto* planar = dynamic_cast<PlanarCodec*>(codec.get());
  if (planar == nullptr) options.fail(inner + " cannot follow a rotation: use cast, quant or sign");
  codec.release();
  return std::make_unique<Rotate>(size_bits, std::unique_ptr<PlanarCodec>(planar));
}

}  // namespace pycomm::codecs::rotate
