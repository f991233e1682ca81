// randomk on the CPU.
#include "codecs/randomk.h"

#include <algorithm>

#include "codecs/base/block_launch.h"
#include "codecs/base/loops.h"
#include "codecs/base/options.h"
#include "codecs/base/registry.h"
#include "core/error.h"

namespace pycomm::codecs::randomk {
namespace {

/// Random words of consecutive stretches; four stretches share a call of Philox.
class Words {
 public:
  explicit Words(const Header& header) : header_(header), next_(header.first) {}

  uint32_t next() {
    if (next_ % 4 == 0 || next_ == header_.first) {
      four_ = random_words(header_.seed, header_.step, header_.tensor, next_ / 4);
    }
    return four_.word[next_++ % 4];
  }

 private:
  Header header_;
  uint64_t next_;
  Random4 four_{};
};

/// Returns the largest magnitude of p in a stretch.
template <bool kFeedback>
PYCOMM_INLINE float max_sum(const float* __restrict x, const float* __restrict residual, size_t n) {
  uint32_t top = 0;
  for (size_t i = 0; i < n; i++) {
    const uint32_t bits = magnitude_bits(kFeedback ? x[i] + residual[i] : x[i]);
    top = bits > top ? bits : top;
  }
  return bits_float(top);
}

template <bool kFeedback>
PYCOMM_SIMD void encode_all(const Format& f, const EncodeArgs& args) {
  const size_t length = stretch_of(f);
  const Header header{args.key.seed, args.index / length, args.key.step, args.key.tensor};
  std::memcpy(args.out.data, &header, kHeader);
  auto* to = reinterpret_cast<float*>(args.out.data + kHeader);
  Words words(header);
  const bool scales = f.unbiased && !args.summed;
  for (size_t lo = 0; lo < args.in.size; lo += length) {
    const size_t n = std::min(length, args.in.size - lo);
    const float* x = args.in.data + lo;
    const float* residual = kFeedback ? args.residual + lo : nullptr;
    float* new_residual = kFeedback ? args.new_residual + lo : nullptr;
    const Choice c = choose(f, n, words.next());
    if (float_bits(max_sum<kFeedback>(x, residual, n)) >= kInfBits) {
      std::fill(to, to + c.slot, bits_float(kNanBits));
      if (kFeedback) std::memmove(new_residual, residual, 4 * n);
    } else {
      const uint32_t end = c.first + c.size;
      for (uint32_t i = c.first; i < end; i++) {
        const float p = kFeedback ? x[i] + residual[i] : x[i];
        to[i - c.first] = scaled(p, c.blocks, scales);
      }
      std::fill(to + c.size, to + c.slot, 0.0f);
      if (kFeedback) {
        for (size_t i = 0; i < c.first; i++) new_residual[i] = x[i] + residual[i];
        for (uint32_t i = c.first; i < end; i++) {
          new_residual[i] = residual_of(x[i] + residual[i], to[i - c.first], residual[i]);
        }
        for (size_t i = end; i < n; i++) new_residual[i] = x[i] + residual[i];
      }
    }
    to += c.slot;
  }
}

template <bool kAdd>
PYCOMM_SIMD void decode_all(const Format& f, Span<const uint8_t> payload, Span<float> out) {
  const size_t length = stretch_of(f);
  Header header;
  std::memcpy(&header, payload.data, kHeader);
  const auto* from = reinterpret_cast<const float*>(payload.data + kHeader);
  Words words(header);
  for (size_t lo = 0; lo < out.size; lo += length) {
    const size_t n = std::min(length, out.size - lo);
    float* __restrict to = out.data + lo;
    const Choice c = choose(f, n, words.next());
    if (magnitude_bits(from[0]) > kInfBits) {
      std::fill(to, to + n, bits_float(kNanBits));
    } else {
      if (!kAdd) std::memset(to, 0, 4 * n);
      for (uint32_t i = 0; i < c.size; i++) {
        to[c.first + i] = kAdd ? to[c.first + i] + from[i] : from[i];
      }
    }
    from += c.slot;
  }
}

// ---------------------------------------------------- launches in CUDA (randomk.cu)

/// Returns the values of a warp.
size_t tile(const Format& f) { return cuda::kLanes / lanes_of(stretch_of(f)) * stretch_of(f); }

void encode_cuda(const Format& format, const EncodeArgs& args) {
  EncodeParams params = encode_params(1, kHeader, args);
  params.group = args.index / stretch_of(format);
  params.options = pack(format, format.unbiased && !args.summed);
  launch("randomk", kernel_name("randomk::encode_kernel", args.residual != nullptr), params,
         args.in.size, tile(format), args.stream);
}

void decode_cuda(const Format& format, Span<const uint8_t> payload, Span<float> out, bool add,
                 const Stream& stream) {
  DecodeParams params = decode_params(1, kHeader, payload, out);
  params.options = pack(format, false);
  launch("randomk", kernel_name("randomk::decode_kernel", add), params, out.size, tile(format),
         stream);
}

class RandomK final : public Codec {
 public:
  explicit RandomK(const Format& format) : format_(format) {}

  std::string_view name() const override { return "randomk"; }
  std::string spec() const override {
    return "randomk:every=" + std::to_string(format_.every) +
           ",block=" + std::to_string(format_.block) +
           ",scale=" + (format_.unbiased ? "unbiased" : "none");
  }
  Combine combine() const override { return Combine::sum; }
  int wire_version() const override { return kWireVersion; }
  size_t granule() const override { return stretch_of(format_); }
  size_t encoded_bytes(size_t numel) const override {
    return randomk::encoded_bytes(format_, numel);
  }

  void encode(const EncodeArgs& args) const override {
    check_encode(*this, args);
    if (args.in.size == 0) return;
    if (args.stream.device == Device::cuda) return encode_cuda(format_, args);
    (args.residual ? encode_all<true> : encode_all<false>)(format_, args);
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
    if (out.size == 0) return;
    if (stream.device == Device::cuda) return decode_cuda(format_, payload, out, kAdd, stream);
    decode_all<kAdd>(format_, payload, out);
  }

  Format format_;
};

uint32_t count_option(Options& options, std::string_view option, uint32_t otherwise,
                      uint32_t most) {
  const int value = options.integer(option, static_cast<int>(otherwise));
  if (value < 1 || value > static_cast<int>(most)) {
    options.fail(std::string(option) + "=" + std::to_string(value) + ": use 1 to " +
                 std::to_string(most));
  }
  return static_cast<uint32_t>(value);
}

}  // namespace

std::unique_ptr<Codec> make(Options& options) {
  Format format;
  format.every = count_option(options, "every", format.every, kMaxEvery);
  format.block = count_option(options, "block", format.block, kLargestBlock);
  format.unbiased = options.choice("scale", {"none", "unbiased"}, 0) == 1;
  options.finish();
  return std::make_unique<RandomK>(format);
}

}  // namespace pycomm::codecs::randomk
