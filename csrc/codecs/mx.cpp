// mx on the CPU: plain loops over mx.h, compiled for several x86 levels.
#include "codecs/mx.h"

#include "codecs/base/bits.h"
#include "codecs/base/block_launch.h"
#include "codecs/base/loops.h"
#include "codecs/base/options.h"

namespace pycomm::codecs::mx {
namespace {

constexpr const char* kNames[] = {"fp8_e4m3", "fp8_e5m2", "fp6_e2m3",
                                  "fp6_e3m2", "fp4_e2m1", "nvfp4"};
/// Values that are processed at once: whole blocks of every kind, in the first-level cache.
constexpr uint32_t kTile = kSuperBlock;

/// Element type and block of a kind.
template <typename SmallFloat, bool kIsNv>
struct Type {
  using Small = SmallFloat;
  static constexpr bool kNv = kIsNv;
  static constexpr uint32_t kBlock = kIsNv ? kNvBlock : mx::kBlock;
  static constexpr uint32_t kBlocks = kTile / kBlock;
};

/// Scales of the blocks of a tile; see BlockScale.
template <typename T>
struct Scales {
  float unit[T::kBlocks];
  float inv[T::kBlocks];
};

PYCOMM_INLINE size_t count(size_t n, size_t begin, size_t block) {
  return n - begin < block ? n - begin : block;
}

/// Measures the blocks of a tile, writes their scales at `codes` and that of the super-block.
template <typename T>
PYCOMM_INLINE void scale_tile(bool ceil, const float* p, size_t n, uint8_t* __restrict codes,
                              float* super, Scales<T>& scales) {
  uint32_t amax[T::kBlocks];
  const size_t blocks = num_blocks(n, T::kBlock);
  const auto put = [&](size_t b, const BlockScale& scale) __attribute__((always_inline)) {
    codes[b] = static_cast<uint8_t>(scale.code);
    scales.unit[b] = scale.unit;
    scales.inv[b] = scale.inv;
  };
  for (size_t b = 0; b < n / T::kBlock; b++) {
    amax[b] = float_bits(max_magnitude(p + b * T::kBlock, T::kBlock));
  }
  if (n % T::kBlock) {
    amax[blocks - 1] = float_bits(max_magnitude(p + n / T::kBlock * T::kBlock, n % T::kBlock));
  }
  if constexpr (T::kNv) {
    uint32_t top = 0;
    for (size_t b = 0; b < blocks; b++) top = amax[b] > top ? amax[b] : top;
    const Scale second = super_scale(bits_float(top));
    *super = second.unit;
    for (size_t b = 0; b < blocks; b++) put(b, nv_scale(amax[b], bits_float(top), second));
  } else {
    for (size_t b = 0; b < blocks; b++) put(b, mx_scale<typename T::Small>(amax[b], ceil));
  }
}

// The loops over a block have few rounds, and gcc would unroll them whole before it vectorises:
// nvfp4 then decodes six times slower.

/// Writes the codes of a block, and its residual.
template <typename Small, bool kFeedback>
PYCOMM_INLINE void encode_block(const float* __restrict p, size_t n, float unit, float inv,
                                uint8_t* __restrict codes, float* __restrict new_residual) {
  // In one loop with the bytes, vectors would have as many values as a block of 16 has bytes.
  uint32_t words[kBlock];
#pragma GCC unroll 1
  for (size_t i = 0; i < n; i++) {
    const Rounded rounded = round_nearest<Small>(p[i] * inv);
    words[i] = rounded.code;
    if (kFeedback) new_residual[i] = p[i] - rounded.value * unit;
  }
#pragma GCC unroll 1
  for (size_t i = 0; i < n; i++) codes[i] = static_cast<uint8_t>(words[i]);
}

template <typename T, bool kFeedback>
PYCOMM_INLINE void encode_tile(const EncodeArgs& args, const Scales<T>& scales, const float* p,
                               size_t lo, size_t n, uint8_t* codes, const float* residual,
                               float* fresh) {
  const bool ahead = args.in.size - lo >= 2 * kTile;
  const float* const plain = args.residual.floats();
  for (size_t b = 0, i = 0; i < n; b++, i += T::kBlock) {
    const size_t m = count(n, i, T::kBlock);
    float* new_residual = kFeedback ? fresh + i : nullptr;
    // A tile is read in bursts that the hardware prefetcher does not follow.
    for (size_t line = 0; ahead && line < T::kBlock; line += 16) {
      __builtin_prefetch(args.in.data + lo + kTile + i + line);
      if (kFeedback && plain) __builtin_prefetch(plain + lo + kTile + i + line);
    }
    if (scales.inv[b] == 0.0f) {
      std::memset(codes + i, 0, m);
      if (kFeedback) {
        std::memmove(new_residual, scales.unit[b] == 0.0f ? p + i : residual + i, m * 4);
      }
    } else if (m == T::kBlock) {
      encode_block<typename T::Small, kFeedback>(p + i, T::kBlock, scales.unit[b], scales.inv[b],
                                                 codes + i, new_residual);
    } else {
      encode_block<typename T::Small, kFeedback>(p + i, m, scales.unit[b], scales.inv[b], codes + i,
                                                 new_residual);
    }
  }
}

template <typename T>
PYCOMM_SIMD void encode_all(const Format& f, const EncodeArgs& args) {
  constexpr int kBits = T::Small::kBits;
  alignas(64) float sum[kTile];
  alignas(64) uint8_t unpacked[kTile];
  Scales<T> scales;
  BlockResiduals<kTile> residuals(args);
  auto* supers = reinterpret_cast<float*>(args.out.data);
  uint8_t* scale_codes = args.out.data + scales_offset(f.kind, args.in.size);
  uint8_t* out = args.out.data + codes_offset(f.kind, args.in.size);
  for (size_t lo = 0; lo < args.in.size; lo += kTile) {
    const size_t n = count(args.in.size, lo, kTile);
    const float* p = args.in.data + lo;
    const float* residual = nullptr;
    if (args.has_residual()) {
      residual = residuals.load(lo, n);
      for (size_t i = 0; i < n; i++) sum[i] = p[i] + residual[i];
      p = sum;
    }
    scale_tile<T>(f.ceil, p, n, scale_codes + lo / T::kBlock, supers + lo / kTile, scales);
    uint8_t* codes = kBits == 8 ? out + lo : unpacked;
    if (args.has_residual()) {
      encode_tile<T, true>(args, scales, p, lo, n, codes, residual, residuals.fresh(lo));
      residuals.store(lo, n);
    } else {
      encode_tile<T, false>(args, scales, p, lo, n, codes, nullptr, nullptr);
    }
    if constexpr (kBits < 8) pack(kBits, unpacked, n, out + lo * kBits / 8);
  }
}

template <typename Small, bool kAdd>
PYCOMM_INLINE void decode_block(const uint8_t* __restrict codes, size_t n, float unit,
                                float* __restrict out) {
#pragma GCC unroll 1
  for (size_t i = 0; i < n; i++) {
    const float value = Small::decode(codes[i]) * unit;
    out[i] = kAdd ? out[i] + value : value;
  }
}

template <typename T, bool kAdd>
PYCOMM_SIMD void decode_all(const Format& f, Span<const uint8_t> payload, Span<float> out) {
  constexpr int kBits = T::Small::kBits;
  alignas(64) uint8_t unpacked[kTile];
  const auto* supers = reinterpret_cast<const float*>(payload.data);
  const uint8_t* scale_codes = payload.data + scales_offset(f.kind, out.size);
  const uint8_t* in = payload.data + codes_offset(f.kind, out.size);
  for (size_t lo = 0; lo < out.size; lo += kTile) {
    const size_t n = count(out.size, lo, kTile);
    if constexpr (kBits < 8) unpack(kBits, in + lo * kBits / 8, n, unpacked);
    const uint8_t* codes = kBits == 8 ? in + lo : unpacked;
    for (size_t i = 0; i < n; i += T::kBlock) {
      const uint32_t code = scale_codes[(lo + i) / T::kBlock];
      const float unit =
          T::kNv ? Float8E4M3::decode(code) * supers[lo / kTile] : decode_scale(code);
      if (n - i >= T::kBlock) {
        decode_block<typename T::Small, kAdd>(codes + i, T::kBlock, unit, out.data + lo + i);
      } else {
        decode_block<typename T::Small, kAdd>(codes + i, n - i, unit, out.data + lo + i);
      }
    }
  }
}

/// Calls `f` with the Type of `kind`, and the name of its element in those of kernels (mx.cu).
template <typename F>
void with_type(Kind kind, const F& f) {
  switch (kind) {
    case Kind::fp8_e4m3:
      return f(Type<Float8E4M3, false>(), "pycomm::Float8E4M3");
    case Kind::fp8_e5m2:
      return f(Type<Float8E5M2, false>(), "pycomm::Float8E5M2");
    case Kind::fp6_e2m3:
      return f(Type<Float6E2M3, false>(), "pycomm::Float6E2M3");
    case Kind::fp6_e3m2:
      return f(Type<Float6E3M2, false>(), "pycomm::Float6E3M2");
    case Kind::fp4_e2m1:
      return f(Type<Float4E2M1, false>(), "pycomm::Float4E2M1");
    case Kind::nvfp4:
      return f(Type<Float4E2M1, true>(), "pycomm::Float4E2M1");
  }
}

/// Returns the name of a kernel.
std::string kernel_of(const char* kernel, Kind kind, bool flag) {
  std::string name;
  with_type(kind, [&](auto type, const std::string& element) {
    name = kernel_name(kernel, element, decltype(type)::kNv, flag);
  });
  return name;
}

class Mx final : public Codec {
 public:
  explicit Mx(const Format& format) : format_(format) {}

  std::string_view name() const override { return "mx"; }
  std::string spec() const override {
    return std::string("mx:format=") + kNames[static_cast<int>(format_.kind)] +
           (format_.kind == Kind::nvfp4 ? ""
            : format_.ceil              ? ",scale=ceil"
                                        : ",scale=floor");
  }
  int wire_version() const override { return kWireVersion; }
  bool takes_stored(Device) const override { return true; }
  bool fuses_sum() const override { return true; }
  size_t granule() const override { return format_.kind == Kind::nvfp4 ? kSuperBlock : kBlock; }
  size_t encoded_bytes(size_t numel) const override {
    return mx::encoded_bytes(format_.kind, numel);
  }

 private:
  void encode_cpu(const EncodeArgs& args) const override {
    with_type(format_.kind, [&](auto type, auto) { encode_all<decltype(type)>(format_, args); });
    const size_t numel = args.in.size, codes = codes_offset(format_.kind, numel);
    const size_t blocks = num_blocks(numel, block(format_.kind));
    zero_padding(args.out.sub(0, codes), scales_offset(format_.kind, numel) + blocks);
    zero_padding(args.out, codes + (numel * bits(format_.kind) + 7) / 8);
  }
  void decode_cpu(Span<const uint8_t> payload, Span<float> out, bool add) const override {
    with_type(format_.kind, [&](auto type, auto) {
      using Type = decltype(type);
      (add ? decode_all<Type, true> : decode_all<Type, false>)(format_, payload, out);
    });
  }
  void encode_cuda(const EncodeArgs& args) const override {
    EncodeParams params =
        encode_params(block(format_.kind), codes_offset(format_.kind, args.in.size), args);
    params.options = format_.ceil ? 1 : 0;
    launch("mx", kernel_of("mx::encode_kernel", format_.kind, args.has_residual()), params,
           args.in.size, kSmall * cuda::kRow, args.stream);
  }
  void decode_cuda(Span<const uint8_t> payload, Span<float> out, bool add,
                   const Stream& stream) const override {
    launch("mx", kernel_of("mx::decode_kernel", format_.kind, add),
           decode_params(block(format_.kind), codes_offset(format_.kind, out.size), payload, out),
           out.size, kSmall * cuda::kRow, stream);
  }

  Format format_;
};

}  // namespace

std::unique_ptr<Codec> make(Options& options) {
  Format format;
  format.kind = static_cast<Kind>(options.choice(
      "format", {kNames[0], kNames[1], kNames[2], kNames[3], kNames[4], kNames[5]}, 0));
  const int scale = options.choice("scale", {"floor", "ceil"}, -1);
  if (format.kind == Kind::nvfp4 && scale != -1) {
    options.fail("nvfp4 has one rule for scales; leave the option scale out");
  }
  format.ceil = scale == 1;
  options.finish();
  return std::make_unique<Mx>(format);
}

}  // namespace pycomm::codecs::mx
