// Element types and ops of the reductions, one element at a time, for gcc and nvcc: the loops are
// in reduce_kernels.h and collectives/device/fold.h.
#pragma once
#include <type_traits>

#include "core/floats.h"

namespace pycomm::kernels {

// Element types: how a type is stored, in what it accumulates (and what `divisor` and `factor`
// become beside it), and how it is converted to that and back. A NaN is stored as the quiet one
// without sign or payload: which NaN an operation gives depends on the processor, on the order of
// its operands and so on the compiler.

template <typename T>
PYCOMM_HD T canonical(T x) {
  return x == x ? x : static_cast<T>(__builtin_nan(""));
}

template <typename T>
struct Float {
  using Stored = T;
  using Acc = T;
  using Scalar = T;
  static PYCOMM_HD Acc load(Stored x) { return x; }
  static PYCOMM_HD Stored store(Acc x) { return canonical(x); }
};

template <typename Format, typename Code>
struct StoredFloat {
  using Stored = Code;
  using Acc = float;
  using Scalar = float;
  static PYCOMM_HD Acc load(Stored x) { return Format::decode(x); }
  // The NaN test works on integers: loops over other forms of it do not vectorise.
  static PYCOMM_HD Stored store(Acc x) {
    const bool nan = (float_bits(x) & 0x7fffffffu) > 0x7f800000u;
    return static_cast<Stored>(nan ? Format::kNan : Format::encode(x));
  }
};

/// Stores with one choice for NaN, where encode() makes another.
template <typename Code>
struct StoredFloat<pycomm::BFloat16, Code> {
  using Stored = Code;
  using Acc = float;
  using Scalar = float;
  static PYCOMM_HD Acc load(Stored x) { return pycomm::BFloat16::decode(x); }
  static PYCOMM_HD Stored store(Acc x) {
    const uint32_t bits = float_bits(x);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
    return static_cast<Stored>(x == x ? rounded : 0x7fc0u);
  }
};

template <typename T>
struct Integer {
  using Stored = T;
  using Acc = T;
  using Scalar = int;
  static PYCOMM_HD Acc load(Stored x) { return x; }
  static PYCOMM_HD Stored store(Acc x) { return x; }
};

template <typename T>
struct ComplexValue {
  T re, im;
};

template <typename T>
struct Complex {
  using Stored = ComplexValue<T>;
  using Acc = ComplexValue<T>;
  using Scalar = T;
  static PYCOMM_HD Acc load(Stored x) { return x; }
  static PYCOMM_HD Stored store(Acc x) { return {canonical(x.re), canonical(x.im)}; }
};

// Ops: `scale` is applied to every input first, `fold` joins two, `finish` ends. A premul_sum
// scales the contribution of one rank, and is a sum from there on.

/// Integers wrap: as unsigned of at least 32 bits, since int overflow (which two uint16 can reach
/// by promotion) is undefined.
template <typename T, bool kInteger = std::is_integral_v<T>>
struct Wrapping {
  using Type = T;
};
template <typename T>
struct Wrapping<T, true> {
  using Type = std::common_type_t<std::make_unsigned_t<T>, unsigned>;
};

struct ReduceRule {
  template <typename Acc, typename Scalar>
  static PYCOMM_HD Acc scale(Acc x, Scalar) {
    return x;
  }
  template <typename Acc, typename Scalar>
  static PYCOMM_HD Acc finish(Acc x, Scalar) {
    return x;
  }
};

struct Sum : ReduceRule {
  template <typename Acc>
  static PYCOMM_HD Acc fold(Acc a, Acc b) {
    using W = typename Wrapping<Acc>::Type;
    return static_cast<Acc>(static_cast<W>(a) + static_cast<W>(b));
  }
};

struct Avg : Sum {
  template <typename Acc, typename Scalar>
  static PYCOMM_HD Acc finish(Acc x, Scalar divisor) {
    return static_cast<Acc>(x / divisor);
  }
};

struct PremulSum : Sum {
  template <typename Acc, typename Scalar>
  static PYCOMM_HD Acc scale(Acc x, Scalar factor) {
    return x * factor;
  }
};

struct Prod : ReduceRule {
  template <typename Acc>
  static PYCOMM_HD Acc fold(Acc a, Acc b) {
    using W = typename Wrapping<Acc>::Type;
    return static_cast<Acc>(static_cast<W>(a) * static_cast<W>(b));
  }
  template <typename T>
  static PYCOMM_HD ComplexValue<T> fold(ComplexValue<T> a, ComplexValue<T> b) {
    return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
  }
};

// A NaN on either side wins; the code is written so that both compile to one compare and one blend.
struct Min : ReduceRule {
  template <typename Acc>
  static PYCOMM_HD Acc fold(Acc a, Acc b) {
    return ((b < a) | (b != b)) ? b : a;
  }
};

struct Max : ReduceRule {
  template <typename Acc>
  static PYCOMM_HD Acc fold(Acc a, Acc b) {
    return ((b > a) | (b != b)) ? b : a;
  }
};

struct Band : ReduceRule {
  template <typename Acc>
  static PYCOMM_HD Acc fold(Acc a, Acc b) {
    return a & b;
  }
};

struct Bor : ReduceRule {
  template <typename Acc>
  static PYCOMM_HD Acc fold(Acc a, Acc b) {
    return a | b;
  }
};

struct Bxor : ReduceRule {
  template <typename Acc>
  static PYCOMM_HD Acc fold(Acc a, Acc b) {
    return a ^ b;
  }
};

}  // namespace pycomm::kernels
