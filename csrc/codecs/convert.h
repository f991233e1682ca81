// Conversion of gradients from one float dtype to another, with scaling: out = cast(x * by * clip /
// divisor), in float32, each operation rounded separately. It unscales and clips what AMP has
// scaled, and it ends a collective with codecs: averages, converts to the bucket's own dtype, and
// reports overflow. Everything that determines the bits is here and in cast.h, compiled by gcc,
// nvcc and NVRTC.
#pragma once
#include "codecs/base/batch.h"
#include "codecs/cast.h"

namespace pycomm {

/// A number, or the address where it will be when the work runs.
struct Factor {
  const float* at = nullptr;  ///< null: the number is `value`
  float value = 1.0f;

  PYCOMM_HD float get() const { return at ? *at : value; }
};

struct ConvertArgs {
  const void* in = nullptr;
  void* out = nullptr;  ///< may be `in`, of values of the same size
  size_t numel = 0;
  DType from = DType::float32, to = DType::float32;  ///< float32, float16 or bfloat16
  Factor by, clip;
  float divisor = 1.0f;
  /// Becomes 1 if a value of `out` is Inf or NaN, else stays as it was; null: not computed.
  float* found_inf = nullptr;
  Stream stream;
};

/// Converts values. Throws Error for any other dtype.
PYCOMM_API void convert(const ConvertArgs& args);

namespace codecs::convert {

constexpr int kRows = 4;  ///< of a warp's tile

/// Arguments of the kernel.
struct Params {
  Blocks blocks;
  const void* in;
  void* out;
  uint64_t numel;
  Factor by, clip;
  float* found_inf;
  float divisor;
};

PYCOMM_HD float scaled(float x, float by, float clip, float divisor) {
  return x * by * clip / divisor;
}

}  // namespace codecs::convert
}  // namespace pycomm
