// Transforms of a rotation, compiled for several x86 levels. Wire format: docs/wire/eden.md.
#include "codecs/rotation/loops.h"

namespace pycomm::codecs {
namespace {

/// One step: values half a block apart become neighbours, a + t b and t a - b. After log2(size)
/// steps that is the transform in its natural order, and no step shuffles within a vector except
/// where it stores.
PYCOMM_INLINE void butterfly(const float* __restrict in, uint32_t size, float* __restrict out,
                             float t = 1.0f) {
  const float* __restrict far = in + size / 2;
  for (uint32_t i = 0; i < size / 2; i++) {
    out[2 * i] = in[i] + t * far[i];
    out[2 * i + 1] = t * in[i] - far[i];
  }
}

/// Two steps at once, with the same operations and half the memory traffic.
PYCOMM_INLINE void butterfly_twice(const float* __restrict in, uint32_t size, float* __restrict out,
                                   float t = 1.0f, float u = 1.0f) {
  const uint32_t quarter = size / 4;
  for (uint32_t i = 0; i < quarter; i++) {
    const float a = in[i], b = in[i + quarter], c = in[i + 2 * quarter], d = in[i + 3 * quarter];
    const float ac = a + t * c, bd = b + t * d, a_c = t * a - c, b_d = t * b - d;
    out[4 * i] = ac + u * bd;
    out[4 * i + 1] = u * ac - bd;
    out[4 * i + 2] = a_c + u * b_d;
    out[4 * i + 3] = u * a_c - b_d;
  }
}

PYCOMM_INLINE void swap(float*& a, float*& b) {
  float* const c = a;
  a = b;
  b = c;
}

/// Transforms `from`; returns the place of the result, `from` or `other`.
PYCOMM_INLINE float* hadamard(float* from, float* other, int size_bits) {
  const uint32_t size = 1u << size_bits;
  if (size_bits % 2) {
    butterfly(from, size, other);
    swap(from, other);
  }
  for (int pair = 0; pair < size_bits / 2; pair++) {
    butterfly_twice(from, size, other);
    swap(from, other);
  }
  return from;
}

/// Three steps in place, at distances of 4, 2 and 1 times `apart`, on whole vectors.
PYCOMM_INLINE void butterfly_thrice(float* __restrict y, uint32_t apart, float t = 1.0f,
                                    float u = 1.0f, float w = 1.0f) {
#pragma GCC ivdep
  for (uint32_t i = 0; i < apart; i++) {
    float v[8];
    for (int k = 0; k < 8; k++) v[k] = y[i + k * apart];
    for (int k = 0; k < 4; k++) {
      const float a = v[k], b = v[k + 4];
      v[k] = a + t * b;
      v[k + 4] = t * a - b;
    }
    for (int k = 0; k < 8; k++) {
      if (k & 2) continue;
      const float a = v[k], b = v[k + 2];
      v[k] = a + u * b;
      v[k + 2] = u * a - b;
    }
    for (int k = 0; k < 8; k += 2) {
      const float a = v[k], b = v[k + 1];
      v[k] = a + w * b;
      v[k + 1] = w * a - b;
    }
    for (int k = 0; k < 8; k++) y[i + k * apart] = v[k];
  }
}

/// First transform of `from`; returns the place of the result, `from` or `other`.
PYCOMM_INLINE float* spread(float* from, float* other, int size_bits) {
  const uint32_t size = 1u << size_bits;
  if (spread_bits(size_bits) < size_bits) {  // six steps
    butterfly_thrice(from, size / 8, kSlope0, kSlope1, kSlope2);
    for (uint32_t lo = 0; lo < size; lo += size / 8) butterfly_thrice(from + lo, size / 64);
    return from;
  }
  if (size_bits % 2) {
    butterfly(from, size, other, kSlope0);
    butterfly_twice(other, size, from, kSlope1, kSlope2);
  } else {
    butterfly_twice(from, size, other, kSlope0, kSlope1);
    butterfly_twice(other, size, from, kSlope2);
  }
  for (int pair = 2 - size_bits % 2; pair < size_bits / 2; pair++) {
    butterfly_twice(from, size, other);
    swap(from, other);
  }
  return from;
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
  if (size == 0) return;  // no bits are requested
  random_block({header.key, 0, stream}, word - skip_, skip_ + size / kSignsPerWord, words_);
}

PYCOMM_SIMD void rotate_block(const RotationSigns& signs, const float* x, const float* residual,
                              size_t n, int size_bits, float* y) {
  alignas(64) float spare[kMaxRotation];
  const uint32_t size = 1u << size_bits;
  // In small rotations both transforms have the same number of passes.
  const bool swaps = spread_bits(size_bits) < size_bits && (size_bits + 1) / 2 % 2;
  float* __restrict first = swaps ? spare : y;
  const float scale = scale_before(size_bits);
  size_t lo = 0;
  for (; lo + kSignsPerWord <= n; lo += kSignsPerWord) {
    const uint32_t word = signs.first[lo / kSignsPerWord];
    if (residual) {
      for (uint32_t i = 0; i < kSignsPerWord; i++) {
        first[lo + i] = signed_by(word, i, (x[lo + i] + residual[lo + i]) * scale);
      }
    } else {
      for (uint32_t i = 0; i < kSignsPerWord; i++) {
        first[lo + i] = signed_by(word, i, x[lo + i] * scale);
      }
    }
  }
  for (; lo < size; lo += kSignsPerWord) {
    for (uint32_t i = 0; i < kSignsPerWord; i++) {
      float p = 0.0f;
      if (lo + i < n) p = residual ? x[lo + i] + residual[lo + i] : x[lo + i];
      first[lo + i] = signed_by(signs.first[lo / kSignsPerWord], i, p * scale);
    }
  }
  float* const other = swaps ? y : spare;
  float* const mixed = spread(first, other, size_bits);
  flip(signs.second, size, 1.0f, mixed);
  hadamard(mixed, mixed == first ? other : first, size_bits);
}

PYCOMM_SIMD void unrotate_block(const RotationSigns& signs, float* y, size_t n, int size_bits,
                                const Sink& sink) {
  alignas(64) float spare[kMaxRotation];
  float* mixed = hadamard(y, spare, size_bits);
  flip(signs.second, 1u << size_bits, scale_between(size_bits), mixed);
  const float* values = spread(mixed, mixed == y ? spare : y, size_bits);
  const float scale = scale_after(size_bits);
  switch (sink.then) {
    case Then::store:
      return finish_block<Then::store>(signs.first, values, n, scale, sink);
    case Then::add:
      return finish_block<Then::add>(signs.first, values, n, scale, sink);
    case Then::store_residual:
      return finish_block<Then::store_residual>(signs.first, values, n, scale, sink);
  }
}
}  // namespace pycomm::codecs
