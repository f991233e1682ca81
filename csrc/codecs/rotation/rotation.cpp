// Transforms of a rotation, compiled for several x86 levels. Wire format: docs/wire/eden.md.
#include <cstring>

#include "codecs/base/targets.h"
#include "codecs/rotation/loops.h"

namespace pycomm::codecs {
namespace {

/// kSteps steps in place, at distances from 2^(kSteps - 1) times `apart` down to `apart`, on whole
/// vectors where `apart` has some. A step makes a + t b and t a - b of values a and b.
template <int kSteps>
PYCOMM_INLINE void steps_from(float* __restrict y, uint32_t apart, float t, float u, float w) {
  constexpr int kValues = 1 << kSteps;
  const float slopes[] = {t, u, w};
#pragma GCC ivdep
  for (uint32_t i = 0; i < apart; i++) {
    float v[kValues];
    for (int k = 0; k < kValues; k++) v[k] = y[i + k * apart];
#pragma GCC unroll 3
    for (int step = 0; step < kSteps; step++) {
      const int far = kValues >> (step + 1);
      const float slope = slopes[step];
#pragma GCC unroll 8
      for (int k = 0; k < kValues; k++) {
        if (k & far) continue;
        const float a = v[k], b = v[k + far];
        v[k] = a + slope * b;
        v[k + far] = slope * a - b;
      }
    }
    for (int k = 0; k < kValues; k++) y[i + k * apart] = v[k];
  }
}

/// The same on each `size` / `span` of y.
template <int kSteps>
PYCOMM_INLINE void steps(float* y, uint32_t size, uint32_t span, float t = 1.0f, float u = 1.0f,
                         float w = 1.0f) {
  for (uint32_t lo = 0; lo < size; lo += span) steps_from<kSteps>(y + lo, span >> kSteps, t, u, w);
}

#ifdef PYCOMM_AVX2

using Eight = float __attribute__((vector_size(32)));
using Places = int __attribute__((vector_size(32)));

/// A step at a distance below eight: the values whose place has the bit kApart are negated, and all
/// get the value at that distance added.
template <int kApart>
PYCOMM_AVX2 inline Eight step_within(Eight y) {
  const Places place = {0, 1, 2, 3, 4, 5, 6, 7};
  const Places negated = (place & kApart) << (kApart == 1 ? 31 : kApart == 2 ? 30 : 29);
  return __builtin_shuffle(y, place ^ kApart) +
         reinterpret_cast<Eight>(reinterpret_cast<Places>(y) ^ negated);
}

/// The steps at distances of less than 16 that are less than `span`, which is 4, 8 or 16.
PYCOMM_AVX2 void last_steps_avx2(float* y, uint32_t size, uint32_t span) {
  for (uint32_t lo = 0; lo < size; lo += 16) {
    Eight a, b;
    std::memcpy(&a, y + lo, sizeof a);
    std::memcpy(&b, y + lo + 8, sizeof b);
    if (span == 16) {
      const Eight sum = a + b;
      b = a - b;
      a = sum;
    }
    if (span >= 8) {
      a = step_within<4>(a);
      b = step_within<4>(b);
    }
    a = step_within<1>(step_within<2>(a));
    b = step_within<1>(step_within<2>(b));
    std::memcpy(y + lo, &a, sizeof a);
    std::memcpy(y + lo + 8, &b, sizeof b);
  }
}

#endif

/// The steps at distances of less than `span`, which is a power of two of at least 4.
PYCOMM_INLINE void hadamard(float* y, uint32_t size, uint32_t span) {
  for (; span >= 128; span /= 8) steps<3>(y, size, span);
  if (span == 64) steps<2>(y, size, span);
  if (span == 32) steps<1>(y, size, span);
  if (span > 16) span = 16;
#ifdef PYCOMM_AVX2
  if (has_avx2()) return last_steps_avx2(y, size, span);
#endif
  for (; span > 1; span /= 2) steps<1>(y, size, span);
}

/// First transform, whose first three steps have slopes.
PYCOMM_INLINE void spread(float* y, int size_bits) {
  const uint32_t size = 1u << size_bits;
  steps<3>(y, size, size, kSlope0, kSlope1, kSlope2);
  if (spread_bits(size_bits) < size_bits) {  // six steps
    steps<3>(y, size, size / 8);
  } else {
    hadamard(y, size, size / 8);
  }
}

PYCOMM_INLINE void flip(const Signs& signs, uint32_t size, float scale, float* __restrict y) {
  for (uint32_t lo = 0; lo < size; lo += kSignsPerWord) {
    const uint32_t word = signs[lo / kSignsPerWord];
    for (uint32_t i = 0; i < kSignsPerWord; i++) y[lo + i] = signed_by(word, i, y[lo + i] * scale);
  }
}

template <Then kThen>
PYCOMM_INLINE void finish(const Sink& sink, size_t i, float value) {
  if (kThen == Then::store) sink.out[i] = value;
  if (kThen == Then::add) sink.out[i] = sink.out[i] + value;
  if (kThen == Then::store_residual) {
    sink.out[i] = residual_of(sink.x[i] + sink.residual[i], value, sink.residual[i]);
  }
}

template <Then kThen>
PYCOMM_INLINE void finish_block(const Signs& signs, const float* __restrict y, size_t n,
                                float scale, const Sink& sink) {
  size_t lo = 0;
  for (; lo + kSignsPerWord <= n; lo += kSignsPerWord) {
    const uint32_t word = signs[lo / kSignsPerWord];
#pragma GCC ivdep
    for (uint32_t i = 0; i < kSignsPerWord; i++) {
      finish<kThen>(sink, lo + i, signed_by(word, i, y[lo + i] * scale));
    }
  }
  for (uint32_t i = 0; lo + i < n; i++) {
    const float value = signed_by(signs[lo / kSignsPerWord], i, y[lo + i] * scale);
    finish<kThen>(sink, lo + i, value);
  }
}

}  // namespace

Signs::Signs(const RotationHeader& header, size_t value, size_t size, uint32_t stream) {
  const uint64_t word = header.word + value / kSignsPerWord;
  skip_ = word % 4;
  random_block({header.key, 0, stream}, word - skip_, skip_ + size / kSignsPerWord, words_);
}

PYCOMM_SIMD void rotate_block(const RotationSigns& signs, const float* x, const float* residual,
                              size_t n, int size_bits, float* __restrict y) {
  const uint32_t size = 1u << size_bits;
  const float scale = scale_before(size_bits);
  size_t lo = 0;
  for (; lo + kSignsPerWord <= n; lo += kSignsPerWord) {
    const uint32_t word = signs.first[lo / kSignsPerWord];
    if (residual) {
      for (uint32_t i = 0; i < kSignsPerWord; i++) {
        y[lo + i] = signed_by(word, i, (x[lo + i] + residual[lo + i]) * scale);
      }
    } else {
      for (uint32_t i = 0; i < kSignsPerWord; i++) {
        y[lo + i] = signed_by(word, i, x[lo + i] * scale);
      }
    }
  }
  for (; lo < size; lo += kSignsPerWord) {
    for (uint32_t i = 0; i < kSignsPerWord; i++) {
      float p = 0.0f;
      if (lo + i < n) p = residual ? x[lo + i] + residual[lo + i] : x[lo + i];
      y[lo + i] = signed_by(signs.first[lo / kSignsPerWord], i, p * scale);
    }
  }
  spread(y, size_bits);
  flip(signs.second, size, 1.0f, y);
  hadamard(y, size, size);
}

PYCOMM_SIMD void unrotate_block(const RotationSigns& signs, float* y, size_t n, int size_bits,
                                const Sink& sink) {
  const uint32_t size = 1u << size_bits;
  hadamard(y, size, size);
  flip(signs.second, size, scale_between(size_bits), y);
  spread(y, size_bits);
  const float scale = scale_after(size_bits);
  switch (sink.then) {
    case Then::store:
      return finish_block<Then::store>(signs.first, y, n, scale, sink);
    case Then::add:
      return finish_block<Then::add>(signs.first, y, n, scale, sink);
    case Then::store_residual:
      return finish_block<Then::store_residual>(signs.first, y, n, scale, sink);
  }
}
}  // namespace pycomm::codecs
