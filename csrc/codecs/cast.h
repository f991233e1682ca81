// cast: float32 as a smaller float, unscaled or with a scale per block. Wire format:
// docs/wire/cast.md. Everything that determines the bits is here and in block.h, compiled by gcc,
// nvcc and NVRTC.
#pragma once
#include "codecs/base/block.h"
#include "core/floats.h"
#include "core/types.h"

namespace pycomm::codecs::cast {

constexpr int kWireVersion = 1;

// There is one struct per dtype. kTop is the largest code, or 0 where there are no blocks. Without
// blocks `encode` takes p and `decode` returns the value; with blocks `round` takes p * inv_scale,
// and `decode` returns a value that is yet to be multiplied by the scale.

struct Float32 {
  using Code = uint32_t;
  static constexpr float kTop = 0.0f;
  PYCOMM_HD static Code encode(float p) {
    return magnitude_bits(p) > kInfBits ? kNanBits : float_bits(p);
  }
  PYCOMM_HD static float decode(Code code) { return bits_float(code); }
};

/// float16 with IEEE rounding: a value beyond 65504 becomes Inf, so that a loss scaler detects the
/// overflow.
struct Float16 {
  using Code = uint16_t;
  static constexpr float kTop = 0.0f;
  PYCOMM_HD static Code encode(float p) {
    return static_cast<Code>(magnitude_bits(p) > kInfBits ? 0x7e00u : pycomm::Float16::encode(p));
  }
  PYCOMM_HD static float decode(Code code) { return pycomm::Float16::decode(code); }
};

struct BFloat16 {
  using Code = uint16_t;
  static constexpr float kTop = 0.0f;
  PYCOMM_HD static Code encode(float p) {
    return static_cast<Code>(magnitude_bits(p) > kInfBits ? 0x7fc0u : pycomm::BFloat16::encode(p));
  }
  PYCOMM_HD static float decode(Code code) { return pycomm::BFloat16::decode(code); }
};

/// Returns the name of the struct of a dtype of gradients, in the names of kernels.
inline const char* type_name(DType dtype) {
  return dtype == DType::float16    ? "cast::Float16"
         : dtype == DType::bfloat16 ? "cast::BFloat16"
                                    : "cast::Float32";
}

struct Float8E4M3 {
  using Code = uint8_t;
  static constexpr float kTop = 448.0f;
  /// No finite p of a used block is out of range: p * inv is at most top * (1 + 2^-23).
  PYCOMM_HD static Rounded round(float v) { return round_in_range<pycomm::Float8E4M3>(v); }
  PYCOMM_HD static float decode(Code code) { return pycomm::Float8E4M3::decode(code); }
  PYCOMM_HD static float decode_by_product(Code code) {
    return pycomm::Float8E4M3::decode_by_product(code);
  }
};

struct Float8E5M2 {
  using Code = uint8_t;
  static constexpr float kTop = 57344.0f;
  /// No finite p of a used block is out of range: p * inv is at most top * (1 + 2^-23).
  PYCOMM_HD static Rounded round(float v) { return round_in_range<pycomm::Float8E5M2>(v); }
  PYCOMM_HD static float decode(Code code) { return pycomm::Float8E5M2::decode(code); }
  PYCOMM_HD static float decode_by_product(Code code) {
    return pycomm::Float8E5M2::decode_by_product(code);
  }
};

enum class Kind : uint8_t { float32, float16, bfloat16, float8_e4m3, float8_e5m2 };

struct Format {
  Kind kind = Kind::float16;
  uint32_t block = 0;  ///< 0 where there are no blocks
};

PYCOMM_HD size_t code_bytes(Kind kind) {
  return kind == Kind::float32 ? 4 : kind == Kind::float16 || kind == Kind::bfloat16 ? 2 : 1;
}
/// The payload is the scales, if there are blocks, then the codes.
PYCOMM_HD size_t codes_offset(const Format& f, size_t numel) {
  return f.block == 0 ? 0 : num_blocks(numel, f.block) * 4;
}
PYCOMM_HD size_t encoded_bytes(const Format& f, size_t numel) {
  return codes_offset(f, numel) + padded(numel * code_bytes(f.kind));
}

}  // namespace pycomm::codecs::cast
