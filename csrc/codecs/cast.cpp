// cast on the CPU: plain loops over cast.h, compiled for several x86 levels.
#include "codecs/cast.h"

#include "codecs/base/block_launch.h"
#include "codecs/base/loops.h"
#include "codecs/base/options.h"

namespace pycomm::codecs::cast {
namespace {

constexpr const char* kNames[] = {"float32", "float16", "bfloat16", "float8_e4m3", "float8_e5m2"};
constexpr uint32_t kDefaultBlock = 256;

/// Scales and codes of the types with blocks, for encode_blocks.
template <typename T>
struct Writer {
  float* scales;
  uint8_t* codes;

  PYCOMM_INLINE Scale scale(size_t block, float amax) const {
    const Scale s = symmetric_scale(amax, T::kTop);
    scales[block] = s.unit;
    return s;
  }
  template <bool kFeedback>
  PYCOMM_INLINE void write(size_t lo, const float* __restrict p, size_t n, Scale s,
                           float* __restrict new_residual) const {
    uint8_t* __restrict to = codes + lo;
    for (size_t i = 0; i < n; i++) {
      const Rounded rounded = T::round(p[i] * s.inv);
      to[i] = static_cast<uint8_t>(rounded.code);
      if (kFeedback) new_residual[i] = p[i] - rounded.value * s.unit;
    }
  }
  PYCOMM_INLINE void zero(size_t lo, size_t n) const { std::memset(codes + lo, 0, n); }
};

template <typename T>
PYCOMM_INLINE void encode_values(const EncodeArgs& args) {
  const float* __restrict x = args.in.data;
  auto* __restrict codes = reinterpret_cast<typename T::Code*>(args.out.data);
  if (!args.has_residual()) {
    for (size_t i = 0; i < args.in.size; i++) codes[i] = T::encode(x[i]);
    return;
  }
  BlockResiduals<> residuals(args);
  for (size_t lo = 0; lo < args.in.size; lo += kMaxBlock) {
    const size_t n = args.in.size - lo < kMaxBlock ? args.in.size - lo : kMaxBlock;
    const float* residual = residuals.load(lo, n);
    float* new_residual = residuals.fresh(lo);
    // These two may be one buffer: then each value is read before it is written.
#pragma GCC ivdep
    for (size_t i = 0; i < n; i++) {
      const float before = residual[i];
      const float p = x[lo + i] + before;
      const typename T::Code code = T::encode(p);
      codes[lo + i] = code;
      new_residual[i] = residual_of(p, T::decode(code), before);
    }
    residuals.store(lo, n);
  }
}

template <typename T>
PYCOMM_SIMD void encode_all(const Format& f, const EncodeArgs& args) {
  if constexpr (T::kTop == 0.0f) {
    encode_values<T>(args);
  } else {
    encode_blocks(args, f.block,
                  Writer<T>{reinterpret_cast<float*>(args.out.data),
                            args.out.data + codes_offset(f, args.in.size)});
  }
}

template <typename T, bool kAdd>
PYCOMM_INLINE void decode_values(const typename T::Code* __restrict codes, size_t n, float s,
                                 float* __restrict out) {
  for (size_t i = 0; i < n; i++) {
    const float value = T::kTop == 0.0f ? T::decode(codes[i]) : T::decode(codes[i]) * s;
    out[i] = kAdd ? out[i] + value : value;
  }
}

template <typename T, bool kAdd>
PYCOMM_SIMD void decode_all(const Format& f, Span<const uint8_t> payload, Span<float> out) {
  using Code = typename T::Code;
  const auto* codes = reinterpret_cast<const Code*>(payload.data + codes_offset(f, out.size));
  if constexpr (T::kTop == 0.0f) {
    decode_values<T, kAdd>(codes, out.size, 1.0f, out.data);
  } else {
    const auto* scales = reinterpret_cast<const float*>(payload.data);
    for (size_t lo = 0; lo < out.size; lo += f.block) {
      const size_t n = out.size - lo < f.block ? out.size - lo : f.block;
      decode_values<T, kAdd>(codes + lo, n, *scales++, out.data + lo);
    }
  }
}

/// Calls `f` with the type of `kind`.
template <typename F>
void with_type(Kind kind, const F& f) {
  switch (kind) {
    case Kind::float32:
      return f(Float32());
    case Kind::float16:
      return f(Float16());
    case Kind::bfloat16:
      return f(BFloat16());
    case Kind::float8_e4m3:
      return f(Float8E4M3());
    case Kind::float8_e5m2:
      return f(Float8E5M2());
  }
}

// ---------------------------------------------------- launches in CUDA (cast.cu)

/// Returns the name of the type of a kind, and of the Coder of one with blocks, for the names of
/// kernels.
std::string type_name(Kind kind) {
  constexpr const char* kTypes[] = {"Float32", "Float16", "BFloat16", "Float8E4M3", "Float8E5M2"};
  return std::string("cast::") + kTypes[static_cast<int>(kind)];
}
std::string coder_name(const std::string& type) { return "cast::Coder<" + type + ">"; }

class Cast final : public Codec {
 public:
  explicit Cast(const Format& format) : format_(format) {}

  std::string_view name() const override { return "cast"; }
  std::string spec() const override {
    const std::string text = std::string("cast:dtype=") + kNames[static_cast<int>(format_.kind)];
    return format_.block == 0 ? text : text + ",block=" + std::to_string(format_.block);
  }
  int wire_version() const override { return kWireVersion; }
  bool fuses_residual() const override { return true; }
  bool loads_residual() const override { return true; }
  bool fuses_sum() const override { return true; }
  size_t granule() const override {
    return format_.block == 0 ? 4 / code_bytes(format_.kind) : format_.block;
  }
  size_t encoded_bytes(size_t numel) const override { return cast::encoded_bytes(format_, numel); }

 private:
  void encode_cpu(const EncodeArgs& args) const override {
    with_type(format_.kind, [&](auto type) { encode_all<decltype(type)>(format_, args); });
    const size_t numel = args.in.size;
    zero_padding(args.out, codes_offset(format_, numel) + numel * code_bytes(format_.kind));
  }
  void decode_cpu(Span<const uint8_t> payload, Span<float> out, bool add) const override {
    with_type(format_.kind, [&](auto type) {
      using Type = decltype(type);
      (add ? decode_all<Type, true> : decode_all<Type, false>)(format_, payload, out);
    });
  }
  void encode_cuda(const EncodeArgs& args) const override {
    const std::string type = type_name(format_.kind);
    const uint32_t block = format_.block;
    const size_t offset = codes_offset(format_, args.in.size);
    if (block) return launch_encode("cast", coder_name(type), block, offset, args);
    launch("cast", kernel_name("cast::encode_plain", type, args.has_residual()),
           encode_params(1, offset, args), args.in.size, kSmall * cuda::kRow, args.stream);
  }
  void decode_cuda(Span<const uint8_t> payload, Span<float> out, bool add,
                   const Stream& stream) const override {
    const std::string type = type_name(format_.kind);
    const uint32_t block = format_.block;
    const size_t offset = codes_offset(format_, out.size);
    if (block) {
      return launch_decode("cast", coder_name(type), block, offset, payload, out, add, stream);
    }
    launch("cast", kernel_name("cast::decode_plain", type, add),
           decode_params(1, offset, payload, out), out.size, kSmall * cuda::kRow, stream);
  }

  Format format_;
};

}  // namespace

std::unique_ptr<Codec> make(Options& options) {
  Format format;
  const int kind = options.choice("dtype", {kNames[0], kNames[1], kNames[2], kNames[3], kNames[4]},
                                  int(Kind::float16));
  format.kind = static_cast<Kind>(kind);
  const bool blocks = code_bytes(format.kind) == 1;
  if (blocks) {
    format.block = block_option(options, kDefaultBlock);
  } else if (options.integer("block", 0) != 0) {
    options.fail(std::string(kNames[kind]) + " has no blocks; leave the option block out");
  }
  options.finish();
  return std::make_unique<Cast>(format);
}

}  // namespace pycomm::codecs::cast
