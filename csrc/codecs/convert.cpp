// Conversion of gradients on the CPU (convert.h): tile by tile, in float32 that stays in the
// first-level cache.
#include "codecs/convert.h"

#include <algorithm>

#include "codecs/base/launch.h"
#include "codecs/base/loops.h"
#include "core/arithmetic.h"
#include "core/error.h"
#include "core/float16.h"

namespace pycomm {
namespace codecs::convert {
namespace {

constexpr size_t kTile = 2048;

PYCOMM_SIMD void widen_bfloat16(const uint16_t* __restrict in, float* __restrict out, size_t n) {
  for (size_t i = 0; i < n; i++) out[i] = cast::BFloat16::decode(in[i]);
}

PYCOMM_SIMD void narrow_bfloat16(const float* __restrict in, uint16_t* __restrict out, size_t n) {
  for (size_t i = 0; i < n; i++) out[i] = cast::BFloat16::encode(in[i]);
}

PYCOMM_SIMD void scale(const float* in, float* out, size_t n, float by, float clip, float divisor) {
  for (size_t i = 0; i < n; i++) out[i] = scaled(in[i], by, clip, divisor);
}

/// True if all values are finite. `exponent` has the bits that are all set in Inf and NaN.
template <typename Code>
PYCOMM_SIMD bool finite(const Code* codes, size_t n, uint32_t exponent) {
  uint32_t bad = 0;
  for (size_t i = 0; i < n; i++) bad |= static_cast<uint32_t>((codes[i] & exponent) == exponent);
  return bad == 0;
}

/// How the CPU converts a dtype.
struct Form {
  size_t bytes;
  uint32_t exponent;
  void (*widen)(const uint16_t* in, float* out, size_t n);  ///< null: it is float32
  void (*narrow)(const float* in, uint16_t* out, size_t n);
};

Form form_of(DType dtype) {
  switch (dtype) {
    case DType::float32:
      return {4, kInfBits, nullptr, nullptr};
    case DType::float16:
      return {2, 0x7c00u, decode_float16, encode_float16};
    case DType::bfloat16:
      return {2, 0x7f80u, widen_bfloat16, narrow_bfloat16};
    default:
      throw Error("convert: dtypes are float32, float16 and bfloat16");
  }
}

void convert_cuda(const ConvertArgs& args) {
  Params params{};
  params.in = args.in;
  params.out = args.out;
  params.numel = args.numel;
  params.by = args.by;
  params.clip = args.clip;
  params.found_inf = args.found_inf;
  params.divisor = args.divisor;
  const std::string kernel =
      kernel_name("convert::convert_kernel", std::string(cast::type_name(args.from)),
                  std::string(cast::type_name(args.to)));
  launch("convert", kernel, params, args.numel, kRows * cuda::kRow, args.stream);
}

}  // namespace
}  // namespace codecs::convert

void convert(const ConvertArgs& args) {
  using namespace codecs::convert;
  const Form from = form_of(args.from), to = form_of(args.to);
  if (args.stream.device == Device::cuda) return convert_cuda(args);

  const DefaultArithmetic arithmetic;
  const float by = args.by.get(), clip = args.clip.get();
  const bool same = by == 1.0f && clip == 1.0f && args.divisor == 1.0f;
  bool fine = true;
  alignas(64) float tile[kTile];
  for (size_t begin = 0; begin < args.numel; begin += kTile) {
    const size_t n = std::min(kTile, args.numel - begin);
    const auto* in = static_cast<const uint8_t*>(args.in) + begin * from.bytes;
    auto* out = static_cast<uint8_t*>(args.out) + begin * to.bytes;
    auto* const codes = reinterpret_cast<uint16_t*>(out);
    float* const wide = to.narrow ? tile : reinterpret_cast<float*>(out);
    const auto* values = reinterpret_cast<const float*>(in);
    if (from.widen) {
      from.widen(reinterpret_cast<const uint16_t*>(in), wide, n);
      values = wide;
    }
    if (!same) {
      scale(values, wide, n, by, clip, args.divisor);
      values = wide;
    }
    if (to.narrow) {
      to.narrow(values, codes, n);
    } else if (values != wide) {
      std::copy_n(values, n, wide);
    }
    if (!args.found_inf) continue;
    fine &= to.narrow ? finite(codes, n, to.exponent)
                      : finite(reinterpret_cast<const uint32_t*>(out), n, to.exponent);
  }
  if (!fine) *args.found_inf = 1.0f;
}

}  // namespace pycomm
