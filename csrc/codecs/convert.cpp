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

size_t bytes_of(DType dtype) { return dtype == DType::float32 ? 4 : 2; }

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
PYCOMM_INLINE bool finite_codes(const Code* codes, size_t n, uint32_t exponent) {
  uint32_t bad = 0;
  for (size_t i = 0; i < n; i++) bad |= static_cast<uint32_t>((codes[i] & exponent) == exponent);
  return bad == 0;
}

PYCOMM_SIMD bool finite_wide(const uint32_t* codes, size_t n) {
  return finite_codes(codes, n, kInfBits);
}

PYCOMM_SIMD bool finite_narrow(const uint16_t* codes, size_t n, uint32_t exponent) {
  return finite_codes(codes, n, exponent);
}

/// Returns values as float32: in place, or in `tile`.
const float* widen(DType from, const uint8_t* in, float* tile, size_t n) {
  const auto* codes = reinterpret_cast<const uint16_t*>(in);
  if (from == DType::float32) return reinterpret_cast<const float*>(in);
  from == DType::float16 ? decode_float16(codes, tile, n) : widen_bfloat16(codes, tile, n);
  return tile;
}

void narrow(DType to, const float* in, uint8_t* out, size_t n) {
  auto* codes = reinterpret_cast<uint16_t*>(out);
  to == DType::float16 ? encode_float16(in, codes, n) : narrow_bfloat16(in, codes, n);
}

bool finite(DType to, const uint8_t* out, size_t n) {
  if (to == DType::float32) return finite_wide(reinterpret_cast<const uint32_t*>(out), n);
  return finite_narrow(reinterpret_cast<const uint16_t*>(out), n,
                       to == DType::float16 ? 0x7c00u : 0x7f80u);
}

void convert_cuda(const ConvertArgs& args) {
  Params params{};
  params.in = args.in;
  params.out = args.out;
  params.numel = args.numel;
  params.by_at = args.by.at;
  params.clip_at = args.clip.at;
  params.found_inf = args.found_inf;
  params.by = args.by.value;
  params.clip = args.clip.value;
  params.divisor = args.divisor;
  const std::string kernel =
      kernel_name("convert::convert_kernel", std::string(cast::type_name(args.from)),
                  std::string(cast::type_name(args.to)));
  launch("convert", kernel, params, args.numel, kRows * cuda::kRow, args.stream);
}

void check(DType dtype) {
  if (dtype == DType::float32 || dtype == DType::float16 || dtype == DType::bfloat16) return;
  throw Error("convert: dtypes are float32, float16 and bfloat16");
}

}  // namespace
}  // namespace codecs::convert

void convert(const ConvertArgs& args) {
  using namespace codecs::convert;
  check(args.from);
  check(args.to);
  if (args.stream.device == Device::cuda) return convert_cuda(args);

  const DefaultArithmetic arithmetic;
  const float by = args.by.at ? *args.by.at : args.by.value;
  const float clip = args.clip.at ? *args.clip.at : args.clip.value;
  const bool same = by == 1.0f && clip == 1.0f && args.divisor == 1.0f;
  bool fine = true;
  alignas(64) float tile[kTile];
  for (size_t begin = 0; begin < args.numel; begin += kTile) {
    const size_t n = std::min(kTile, args.numel - begin);
    const auto* in = static_cast<const uint8_t*>(args.in) + begin * bytes_of(args.from);
    auto* out = static_cast<uint8_t*>(args.out) + begin * bytes_of(args.to);
    float* const wide = args.to == DType::float32 ? reinterpret_cast<float*>(out) : tile;
    const float* values = widen(args.from, in, wide, n);
    if (!same) {
      scale(values, wide, n, by, clip, args.divisor);
      values = wide;
    }
    if (args.to != DType::float32) {
      narrow(args.to, values, out, n);
    } else if (values != wide) {
      std::copy_n(values, n, wide);
    }
    if (args.found_inf) fine &= finite(args.to, out, n);
  }
  if (!fine) *args.found_inf = 1.0f;
}

}  // namespace pycomm
