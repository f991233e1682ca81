// lossless on the CPU.
#include "codecs/lossless.h"

#include <algorithm>

#include "codecs/base/bits.h"
#include "codecs/base/launch.h"
#include "codecs/base/loops.h"
#include "codecs/base/options.h"

namespace pycomm::codecs::lossless {
namespace {

/// Counts the offsets of a block that are `limit` or more, fewer than all; those beyond its end are
/// 0. Each of 64 bytes counts for itself, then the sum of the bytes of a word is in its highest
/// one.
PYCOMM_INLINE uint32_t count_from(const uint8_t* __restrict offset, uint8_t limit) {
  alignas(64) uint8_t count[64] = {};
  for (size_t i = 0; i < kBlock; i += 64) {
    for (size_t k = 0; k < 64; k++) count[k] += offset[i + k] >= limit;
  }
  uint64_t sum = 0, word;
  for (size_t k = 0; k < 64; k += 8) {
    std::memcpy(&word, count + k, 8);
    sum += word;
  }
  return static_cast<uint32_t>(sum * 0x0101010101010101u >> 56);
}

/// Calls f(i) for each byte of `marks` that is 1, in order; others are 0. There are kBlock bytes,
/// of which few are marked.
template <typename F>
PYCOMM_INLINE void for_each_marked(const uint8_t* marks, F&& f) {
  for (size_t i = 0; i < kBlock; i += 8) {
    uint64_t word;
    std::memcpy(&word, marks + i, 8);
    for (; word != 0; word &= word - 1) f(i + static_cast<size_t>(__builtin_ctzll(word)) / 8);
  }
}

/// Writer of the stream from both ends.
struct Writer {
  uint8_t* codes;
  uint8_t* escaped;

  /// Writes the head and the part of the stream of a block of n values. `exponent` has 0 beyond
  /// them.
  PYCOMM_INLINE void write(const uint8_t* __restrict exponent, size_t n, uint8_t* __restrict head) {
    alignas(64) uint8_t offset[kBlock];
    alignas(64) uint8_t mark[kBlock];
    uint8_t top = 0, any = 0;
    for (size_t i = 0; i < kBlock; i++) top = exponent[i] > top ? exponent[i] : top;
    for (size_t i = 0; i < kBlock; i++) offset[i] = static_cast<uint8_t>(top - exponent[i]);
    for (size_t i = n; i < kBlock; i++) offset[i] = 0;
    for (size_t i = 0; i < kBlock; i++) any |= offset[i];
    const Choice choice = choose(n, any == 0, [&](uint32_t width) {
      return count_from(offset, static_cast<uint8_t>(largest_code(width)));
    });
    head[0] = top;
    head[1] = static_cast<uint8_t>(choice.width);
    head[2] = static_cast<uint8_t>(choice.escaped);
    if (choice.width == 0) return;
    const auto largest = static_cast<uint8_t>(largest_code(choice.width));
    if (choice.escaped > 0) {
      for (size_t i = 0; i < kBlock; i++) mark[i] = offset[i] >= largest;
      for_each_marked(mark, [&](size_t i) { *--escaped = exponent[i]; });
    }
    for (size_t i = 0; i < kBlock; i++) offset[i] = offset[i] < largest ? offset[i] : largest;
    pack(choice.width, offset, num_blocks(n, kGroup) * kGroup, codes);
    codes += 4 * code_words(choice.width, n);
  }
};

/// Reader of the stream from both ends; beyond them it reads bytes of ones.
class Reader {
 public:
  Reader(const uint8_t* begin, const uint8_t* end) : begin_(begin), end_(end) {}

  /// Reads the exponents of a block of n values.
  PYCOMM_INLINE void read(const uint8_t* head, size_t n, uint8_t* __restrict exponent) {
    const uint8_t top = head[0];
    const uint32_t width = width_of(head[1]);
    if (width == 0) {
      std::memset(exponent, top, kBlock);
      escaped_ += head[2];
      return;
    }
    alignas(64) uint8_t code[kBlock] = {};
    alignas(64) uint8_t mark[kBlock];
    unpack(width, codes(), n, code);
    for (size_t i = 0; i < kBlock; i++) exponent[i] = static_cast<uint8_t>(top - code[i]);
    if (escapes(width)) {
      const auto largest = static_cast<uint8_t>(largest_code(width));
      uint8_t any = 0;
      for (size_t i = 0; i < kBlock; i++) any |= mark[i] = code[i] == largest;
      for (size_t i = n; i < kBlock; i++) mark[i] = 0;
      size_t next = escaped_;
      if (any) for_each_marked(mark, [&](size_t i) { exponent[i] = escaped(next++); });
    }
    codes_ += 4 * code_words(width, n);
    escaped_ += head[2];
  }

 private:
  size_t size() const { return static_cast<size_t>(end_ - begin_); }

  /// Returns the next kBlock bytes.
  const uint8_t* codes() {
    const size_t left = size() - std::min(codes_, size());
    if (left >= kBlock) return begin_ + codes_;
    std::memcpy(rest_, end_ - left, left);
    std::memset(rest_ + left, 0xff, kBlock - left);
    return rest_;
  }
  uint8_t escaped(size_t i) const {
    return i < size() ? end_[-1 - static_cast<ptrdiff_t>(i)] : 0xff;
  }

  const uint8_t* begin_;
  const uint8_t* end_;
  size_t codes_ = 0, escaped_ = 0;  // of the blocks before
  uint8_t rest_[kBlock];
};

template <bool kWide, bool kFeedback>
PYCOMM_SIMD void encode_all(const EncodeArgs& args) {
  const Layout at(args.in.size, kWide);
  uint8_t* out = args.out.data;
  uint8_t* const end = out + args.out.size;
  // Clears the header and the padding of each section of fixed size.
  for (size_t from : {size_t{0}, at.low - 16, at.heads - 16, at.stream - 16}) {
    std::memset(out + from, 0, 16);
  }
  Writer stream{out + at.stream, end};
  BlockResiduals<kBlock> residuals(args);
  alignas(64) uint32_t bits[kBlock];
  alignas(64) uint8_t exponent[kBlock];
  for (size_t lo = 0; lo < args.in.size; lo += kBlock) {
    const size_t n = std::min<size_t>(kBlock, args.in.size - lo);
    const float* x = args.in.data + lo;
    const float* residual = kFeedback ? residuals.load(lo, n) : nullptr;
    float* new_residual = kFeedback ? residuals.fresh(lo) : nullptr;
    // These two may be one buffer: then each value is read before it is written.
#pragma GCC ivdep
    for (size_t i = 0; i < n; i++) {
      const float p = kFeedback ? x[i] + residual[i] : x[i];
      bits[i] = value_bits(p, kWide);
      if (kFeedback) new_residual[i] = residual_of(p, bits_float(bits[i]), residual[i]);
    }
    if (kFeedback) residuals.store(lo, n);
    for (size_t i = n; i < kBlock; i++) bits[i] = 0;
    uint8_t* __restrict high = out + at.high + lo;
    for (size_t i = 0; i < n; i++) high[i] = static_cast<uint8_t>(high_of(bits[i]));
    if (kWide) {
      auto* __restrict low = reinterpret_cast<uint16_t*>(out + at.low) + lo;
      for (size_t i = 0; i < n; i++) low[i] = static_cast<uint16_t>(bits[i]);
    }
    for (size_t i = 0; i < kBlock; i++) exponent[i] = static_cast<uint8_t>(bits[i] >> 23);
    stream.write(exponent, n, out + at.heads + lo / kBlock * kHead);
  }
  // The two ends of the stream are adjacent, with less than a word of padding between them.
  const auto escaped = static_cast<size_t>(end - stream.escaped);
  const size_t used = padded(static_cast<size_t>(stream.codes - out) + escaped);
  uint8_t* const to = out + used - escaped;
  std::memmove(to, stream.escaped, escaped);
  std::memset(stream.codes, 0, static_cast<size_t>(to - stream.codes));
  std::memset(out + used, 0, static_cast<size_t>(end - out) - used);
  const auto header = static_cast<uint32_t>(used);
  std::memcpy(out, &header, sizeof header);
}

template <bool kWide, bool kAdd>
PYCOMM_SIMD void decode_all(Span<const uint8_t> payload, Span<float> out) {
  const Layout at(out.size, kWide);
  uint32_t used;
  std::memcpy(&used, payload.data, sizeof used);
  Reader stream(payload.data + at.stream, payload.data + at.end(used));
  alignas(64) uint8_t exponent[kBlock];
  for (size_t lo = 0; lo < out.size; lo += kBlock) {
    const size_t n = std::min<size_t>(kBlock, out.size - lo);
    stream.read(payload.data + at.heads + lo / kBlock * kHead, n, exponent);
    const uint8_t* __restrict high = payload.data + at.high + lo;
    const auto* __restrict low = reinterpret_cast<const uint16_t*>(payload.data + at.low) + lo;
    float* __restrict to = out.data + lo;
    for (size_t i = 0; i < n; i++) {
      const float value = value_of(high[i], exponent[i], kWide ? low[i] : 0);
      to[i] = kAdd ? to[i] + value : value;
    }
  }
}

// ---------------------------------------------------- launches in CUDA (lossless.cu)

constexpr size_t kTile = kRows * cuda::kRow;

/// Computes places from heads.
void launch_scan(const LosslessParams& params, const Stream& stream) {
  launch("lossless", "lossless::sum_kernel", params, num_blocks(params.numel, kBlock), kSpan,
         stream);
  launch("lossless", "lossless::scan_kernel", params, 1, 1, stream);
}

class Lossless final : public Codec {
 public:
  explicit Lossless(bool wide) : wide_(wide) {}

  std::string_view name() const override { return "lossless"; }
  std::string spec() const override {
    return wide_ ? "lossless:dtype=float32" : "lossless:dtype=bfloat16";
  }
  int wire_version() const override { return kWireVersion; }
  bool takes_stored(Device device) const override { return device == Device::cpu; }
  size_t granule() const override { return kBlock; }
  bool variable() const override { return true; }
  size_t encoded_bytes(size_t numel) const override {
    return numel == 0 ? 0 : Layout(numel, wide_).bytes;
  }
  size_t scratch_bytes(size_t numel) const override {
    return numel == 0 ? 0 : Scratch(numel).bytes;
  }

 private:
  void encode_cpu(const EncodeArgs& args) const override {
    if (args.has_residual()) {
      (wide_ ? encode_all<true, true> : encode_all<false, true>)(args);
    } else {
      (wide_ ? encode_all<true, false> : encode_all<false, false>)(args);
    }
  }
  void decode_cpu(Span<const uint8_t> payload, Span<float> out, bool add) const override {
    const auto run = wide_ ? (add ? decode_all<true, true> : decode_all<true, false>)
                           : (add ? decode_all<false, true> : decode_all<false, false>);
    run(payload, out);
  }

  void encode_cuda(const EncodeArgs& args) const override {
    auto params = staged_params<LosslessParams>(args);
    params.wide = wide_ ? 1 : 0;
    launch("lossless", kernel_name("lossless::head_kernel", args.has_residual()), params,
           args.in.size, kTile, args.stream);
    launch_scan(params, args.stream);
    launch("lossless", "lossless::pack_kernel", params, args.in.size, kTile, args.stream);
  }
  void decode_cuda(Span<const uint8_t> payload, Span<float> out, bool add,
                   const Stream& stream) const override {
    auto params = staged_params<LosslessParams>(payload, out, stream);
    params.wide = wide_ ? 1 : 0;
    launch_scan(params, stream);
    launch("lossless", kernel_name("lossless::decode_kernel", add), params, out.size, kTile,
           stream);
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
