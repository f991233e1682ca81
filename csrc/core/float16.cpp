#include "core/float16.h"

#include "core/floats.h"

#if defined(__x86_64__) && !defined(PYCOMM_NO_SIMD)
#include <immintrin.h>
#define PYCOMM_F16C __attribute__((target("avx,f16c")))
#endif

namespace pycomm {
namespace {

// Both ways give a NaN the same bits, those of the instruction: it is quiet and keeps its sign and
// the part of its payload that fits. So results do not depend on where vectors end.

constexpr uint32_t kInf = 0x7f800000, kQuiet = 0x00400000;

bool is_nan(uint32_t bits) { return (bits & 0x7fffffffu) > kInf; }

PYCOMM_SIMD void decode_by_bits(const uint16_t* in, float* out, size_t n) {
  for (size_t i = 0; i < n; i++) {
    const uint32_t bits = float_bits(Float16::decode(in[i]));
    out[i] = bits_float(is_nan(bits) ? bits | kQuiet : bits);
  }
}

PYCOMM_SIMD void encode_by_bits(const float* in, uint16_t* out, size_t n) {
  for (size_t i = 0; i < n; i++) {
    const uint32_t bits = float_bits(in[i]), payload = bits >> 13 & 0x3ffu;
    out[i] = static_cast<uint16_t>(Float16::encode(in[i]) | (is_nan(bits) ? payload : 0));
  }
}

#ifdef PYCOMM_F16C
constexpr size_t kLanes = 8;

// Both convert whole vectors and return the number of values. They ignore the flush-to-zero modes.
PYCOMM_F16C size_t decode_by_instruction(const uint16_t* in, float* out, size_t n) {
  const size_t end = n - n % kLanes;
  for (size_t i = 0; i < end; i += kLanes) {
    const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i));
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(codes));
  }
  return end;
}

PYCOMM_F16C size_t encode_by_instruction(const float* in, uint16_t* out, size_t n) {
  constexpr int kNearestEven = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  const size_t end = n - n % kLanes;
  for (size_t i = 0; i < end; i += kLanes) {
    const __m128i codes = _mm256_cvtps_ph(_mm256_loadu_ps(in + i), kNearestEven);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), codes);
  }
  return end;
}

bool has_instruction() {
  static const bool has = __builtin_cpu_supports("f16c") && __builtin_cpu_supports("avx");
  return has;
}
#endif

}  // namespace

void decode_float16(const uint16_t* in, float* out, size_t n) {
  size_t done = 0;
#ifdef PYCOMM_F16C
  if (has_instruction()) done = decode_by_instruction(in, out, n);
#endif
  decode_by_bits(in + done, out + done, n - done);
}

void encode_float16(const float* in, uint16_t* out, size_t n) {
  size_t done = 0;
#ifdef PYCOMM_F16C
  if (has_instruction()) done = encode_by_instruction(in, out, n);
#endif
  encode_by_bits(in + done, out + done, n - done);
}

}  // namespace pycomm
