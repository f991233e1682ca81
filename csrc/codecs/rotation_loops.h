// The random rotation on the CPU: loops over one block, which stays in the first-level cache. They
// are inlined into the PYCOMM_SIMD functions of rotate.cpp and eden.cpp.
#pragma once
#include "codecs/loops.h"
#include "codecs/rotation.h"

namespace pycomm::codecs {

/// A random bit for each of `size` values, from the one at `value` of the payload on: their signs,
/// or another `stream` of bits.
struct Signs {
  PYCOMM_INLINE Signs(const RotationHeader& header, size_t value, size_t size,
                      uint32_t stream = 0) {
    const uint64_t word = header.word + value / kSignsPerWord;
    skip_ = word % 4;
    const size_t words = skip_ + size / kSignsPerWord;
    random_block({header.key, 0, stream}, word - skip_, words, words_);
  }
  /// Signs of the values from 32 * `place` on, the lowest bit first.
  PYCOMM_INLINE uint32_t operator[](size_t place) const { return words_[skip_ + place]; }

 private:
  alignas(64) uint32_t words_[kMaxRotation / kSignsPerWord + 8];
  size_t skip_;
};

/// One step: values half a block apart become neighbours, their sum and their difference. After
/// log2(size) steps that is the transform in its natural order, and no step shuffles in a vector
/// but where it stores.
PYCOMM_INLINE void butterfly(const float* __restrict in, uint32_t size, float* __restrict out) {
  const float* __restrict far = in + size / 2;
  for (uint32_t i = 0; i < size / 2; i++) {
    out[2 * i] = in[i] + far[i];
    out[2 * i + 1] = in[i] - far[i];
  }
}

/// Two steps at once, with the same additions: half the traffic.
PYCOMM_INLINE void butterfly_twice(const float* __restrict in, uint32_t size,
                                   float* __restrict out) {
  const uint32_t quarter = size / 4;
  for (uint32_t i = 0; i < quarter; i++) {
    const float a = in[i], b = in[i + quarter], c = in[i + 2 * quarter], d = in[i + 3 * quarter];
    const float ac = a + c, bd = b + d, a_c = a - c, b_d = b - d;
    out[4 * i] = ac + bd;
    out[4 * i + 1] = ac - bd;
    out[4 * i + 2] = a_c + b_d;
    out[4 * i + 3] = a_c - b_d;
  }
}

/// Transforms `from`; returns where the result stands, `from` or `other`.
PYCOMM_INLINE float* hadamard(float* from, float* other, int size_bits) {
  const uint32_t size = 1u << size_bits;
  if (size_bits % 2) {
    butterfly(from, size, other);
    float* swapped = from;
    from = other;
    other = swapped;
  }
  for (int pair = 0; pair < size_bits / 2; pair++) {
    butterfly_twice(from, size, other);
    float* swapped = from;
    from = other;
    other = swapped;
  }
  return from;
}

/// The rotation of x + residual (null: of x). Behind the n values that there are stand zeros.
PYCOMM_INLINE void rotate_block(const Signs& signs, const float* x, const float* residual, size_t n,
                                int size_bits, float* __restrict y) {
  alignas(64) float spare[kMaxRotation];
  const uint32_t size = 1u << size_bits;
  const bool swaps = (size_bits + 1) / 2 % 2;  // an odd number of passes
  float* __restrict first = swaps ? spare : y;
  const float scale = scale_before(size_bits);
  size_t lo = 0;
  for (; lo + kSignsPerWord <= n; lo += kSignsPerWord) {
    const uint32_t word = signs[lo / kSignsPerWord];
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
      first[lo + i] = signed_by(signs[lo / kSignsPerWord], i, p * scale);
    }
  }
  hadamard(first, swaps ? y : spare, size_bits);
}

/// What becomes of the values that a block decodes to.
enum class Then : uint8_t { store, add, owe };

struct Sink {
  Then then = Then::store;
  float* out = nullptr;             ///< values, or the new residual
  const float* x = nullptr;         ///< owe: p = x + residual
  const float* residual = nullptr;  ///< owe

  Sink from(size_t at) const {
    return {then, out + at, x ? x + at : nullptr, residual ? residual + at : nullptr};
  }
};

template <Then kThen>
PYCOMM_INLINE void finish(const Sink& sink, size_t i, float value) {
  if (kThen == Then::store) sink.out[i] = value;
  if (kThen == Then::add) sink.out[i] = sink.out[i] + value;
  if (kThen == Then::owe) {
    sink.out[i] = owed(sink.x[i] + sink.residual[i], value, sink.residual[i]);
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

/// The way back from y, which is lost: n values to the sink.
PYCOMM_INLINE void unrotate_block(const Signs& signs, float* y, size_t n, int size_bits,
                                  const Sink& sink) {
  alignas(64) float spare[kMaxRotation];
  const float* values = hadamard(y, spare, size_bits);
  const float scale = scale_after(size_bits);
  switch (sink.then) {
    case Then::store:
      return finish_block<Then::store>(signs, values, n, scale, sink);
    case Then::add:
      return finish_block<Then::add>(signs, values, n, scale, sink);
    case Then::owe:
      return finish_block<Then::owe>(signs, values, n, scale, sink);
  }
}

}  // namespace pycomm::codecs
