// cast on the CPU: plain loops over cast.h, compiled for several x86 levels.
#include "codecs/cast.h"

#include "codecs/base/block_launch.h"
#include "codecs/base/loops.h"
#include "codecs/base/options.h"

namespace pycomm::codecs::cast {
namespace {

constexpr const char* kNames[] = {"float32", "float16", "bfloat16", "float8_e4m3", "float8_e5m2"};
constexpr uint32_t kDefaultBlock = 256;

template <typename T, bool kFeedback>
PYCOMM_INLINE void encode_values(const EncodeArgs& args) {
  const float* __restrict x = args.in.data;
  auto* __restrict codes = reinterpret_cast<typename T::Code*>(args.out.data);
  zero_padding(args.out, args.in.size * sizeof *codes);
  if (!kFeedback) {
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

template <typename T, bool kFeedback>
PYCOMM_SIMD void encode_all(const Format& f, const EncodeArgs& args) {
  if constexpr (T::kTop == 0.0f) {
    encode_values<T, kFeedback>(args);
  } else {
    encode_blocks<kFeedback>(
        args, {f.block, 8, codes_offset(f, args.in.size)}, T::kTop, [](size_t, size_t) {},
        [](size_t, float v) __attribute__((always_inline)) { return T::round(v); });
  }
}

template <typename T, bool kAdd>
PYCOMM_SIMD void decode_all(const Format& f, Span<const uint8_t> payload, Span<float> out) {
  if constexpr (T::kTop != 0.0f) {
    return decode_blocks<kAdd>(payload, out, {f.block, 8, codes_offset(f, out.size)},
                               [](uint8_t code)
                                   __attribute__((always_inline)) { return T::decode(code); });
  }
  const auto* __restrict codes = reinterpret_cast<const typename T::Code*>(payload.data);
  float* __restrict to = out.data;
  for (size_t i = 0; i < out.size; i++) {
    const float value = T::decode(codes[i]);
    to[i] = kAdd ? to[i] + value : value;
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
  bool takes_stored(Device) const override { return true; }
  bool fuses_sum() const override { return true; }
  size_t granule() const override {
    return format_.block == 0 ? 4 / code_bytes(format_.kind) : format_.block;
  }
  size_t encoded_bytes(size_t numel) const override { return cast::encoded_bytes(format_, numel); }

 private:
  void encode_cpu(const EncodeArgs& args) const override {
    with_type(format_.kind, [&](auto type) {
      using Type = decltype(type);
      (args.has_residual() ? encode_all<Type, true> : encode_all<Type, false>)(format_, args);
    });
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
