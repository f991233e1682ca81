// sign on the CPU: plain loops over sign.h, compiled for several x86 levels.
#include "codecs/sign.h"

#include "codecs/base/block_launch.h"
#include "codecs/base/loops.h"
#include "codecs/base/options.h"

namespace pycomm::codecs::sign {
namespace {

constexpr size_t kWord = 32;

/// Returns the sum of the magnitudes of a block, which is padded with zeros: each half is added to
/// the other until one number is left. `half` has room for half a block.
PYCOMM_INLINE float sum_magnitudes(const float* __restrict p, uint32_t block,
                                   float* __restrict half) {
  for (uint32_t i = 0; i < block / 2; i++) {
    half[i] = bits_float(magnitude_bits(p[i])) + bits_float(magnitude_bits(p[i + block / 2]));
  }
  for (uint32_t width = block / 4; width > 0; width /= 2) {
    for (uint32_t i = 0; i < width; i++) half[i] = half[i] + half[i + width];
  }
  return half[0];
}

/// Loads p = x + residual (null: x), padded with zeros to a block.
PYCOMM_INLINE void load_block(const float* __restrict x, const float* __restrict residual, size_t n,
                              uint32_t block, float* __restrict p) {
  for (size_t i = 0; i < n; i++) p[i] = residual ? x[i] + residual[i] : x[i];
  for (size_t i = n; i < block; i++) p[i] = 0.0f;
}

/// Writes the bits of a block that is padded with zeros.
template <bool kFeedback>
PYCOMM_INLINE void write_block(const float* __restrict p, size_t n, float s,
                               uint32_t* __restrict words, float* __restrict left) {
  for (size_t lo = 0; lo < n; lo += kWord) {
    uint32_t word = 0;
    for (size_t i = 0; i < kWord; i++) word |= quantize(p[lo + i]) << i;
    words[lo / kWord] = word;
  }
  if (!kFeedback) return;
  for (size_t i = 0; i < n; i++) left[i] = p[i] - dequantize(quantize(p[i]), s);
}

template <bool kFeedback>
PYCOMM_SIMD void encode_all(uint32_t block, const EncodeArgs& args) {
  alignas(64) float sum[kMaxBlock];
  alignas(64) float half[kMaxBlock / 2];
  auto* scales = reinterpret_cast<float*>(args.out.data);
  auto* words = reinterpret_cast<uint32_t*>(args.out.data + codes_offset(block, args.in.size));
  BlockResiduals<> residuals(args);
  for (size_t lo = 0; lo < args.in.size; lo += block) {
    const size_t n = args.in.size - lo < block ? args.in.size - lo : block;
    const float* x = args.in.data + lo;
    const float* p = x;
    const float* const residual = kFeedback ? residuals.load(lo, n) : nullptr;
    if (kFeedback || n < block) {
      p = sum;
      load_block(x, residual, n, block, sum);
    }
    const float mean = mean_scale(sum_magnitudes(p, block, half), n);
    *scales++ = mean;
    if (used(mean)) {
      write_block<kFeedback>(p, n, mean, words, kFeedback ? residuals.fresh(lo) : nullptr);
    } else {
      std::memset(words, 0, (n + kWord - 1) / kWord * 4);
      // The residual of a tiny block is all of p; a block that is not finite keeps its old
      // residual.
      if (kFeedback) {
        std::memmove(residuals.fresh(lo), mean == 0.0f ? p : residual, n * 4);
      }
    }
    if (kFeedback) residuals.store(lo, n);
    words += block / kWord;
  }
}

template <bool kAdd>
PYCOMM_SIMD void decode_all(uint32_t block, Span<const uint8_t> payload, Span<float> out) {
  const auto* scales = reinterpret_cast<const float*>(payload.data);
  const auto* words =
      reinterpret_cast<const uint32_t*>(payload.data + codes_offset(block, out.size));
  for (size_t lo = 0; lo < out.size; lo += kWord) {
    const float s = scales[lo / block];
    const uint32_t word = *words++;
    float* __restrict to = out.data + lo;
    const size_t n = out.size - lo < kWord ? out.size - lo : kWord;
    if (n == kWord) {
      for (uint32_t i = 0; i < kWord; i++) {
        const float value = dequantize(word >> i, s);
        to[i] = kAdd ? to[i] + value : value;
      }
    } else {
      for (uint32_t i = 0; i < n; i++) {
        const float value = dequantize(word >> i, s);
        to[i] = kAdd ? to[i] + value : value;
      }
    }
  }
}

class Sign final : public Codec {
 public:
  explicit Sign(uint32_t block) : block_(block) {}

  std::string_view name() const override { return "sign"; }
  std::string spec() const override { return "sign:block=" + std::to_string(block_); }
  int wire_version() const override { return kWireVersion; }
  bool takes_stored(Device) const override { return true; }
  bool fuses_sum() const override { return true; }
  size_t granule() const override { return block_; }
  size_t encoded_bytes(size_t numel) const override { return sign::encoded_bytes(block_, numel); }

 private:
  void encode_cpu(const EncodeArgs& args) const override {
    (args.has_residual() ? encode_all<true> : encode_all<false>)(block_, args);
  }
  void decode_cpu(Span<const uint8_t> payload, Span<float> out, bool add) const override {
    (add ? decode_all<true> : decode_all<false>)(block_, payload, out);
  }
  void encode_cuda(const EncodeArgs& args) const override {
    const int size = static_cast<int>(block_);
    launch("sign", kernel_name("sign::encode_kernel", size, args.has_residual()),
           encode_params(block_, codes_offset(block_, args.in.size), args), args.in.size,
           tile_rows(size) * cuda::kRow, args.stream);
  }
  void decode_cuda(Span<const uint8_t> payload, Span<float> out, bool add,
                   const Stream& stream) const override {
    launch("sign", kernel_name("sign::decode_kernel", add),
           decode_params(block_, codes_offset(block_, out.size), payload, out), out.size,
           kSmall * cuda::kRow, stream);
  }

  uint32_t block_;
};

}  // namespace

std::unique_ptr<Codec> make(Options& options) {
  const uint32_t block = block_option(options, kDefaultBlock);
  options.finish();
  return std::make_unique<Sign>(block);
}

}  // namespace pycomm::codecs::sign
