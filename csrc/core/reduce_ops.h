// Element types and ops of the reductions, one element at a time, for gcc and nvcc: the loops are
// in reduce_kernels.h and collectives/device_fold.h.
#pragma once
#include <type_traits>

#include "core/floats.h"

namespace pycomm::kernels {

// Element types: how one is stored, in what it accumulates (with what `divisor` and `factor` become
// beside it), and how it goes there and back.

template <typename T>
struct Float {
  using Stored = T;
  using Acc = T;
  using Scalar = T;
  static PYCOMM_HD Acc load(Stored x) { return x; }
  static PYCOMM_HD Stored store(Acc x) { return x; }
};

template <typename Format, typename Code>
struct SmallFloat {
  using Stored = Code;
  using Acc = float;
  using Scalar = float;
  static PYCOMM_HD Acc load(Stored x) { return Format::decode(x); }
  static PYCOMM_HD Stored store(Acc x) { return static_cast<Stored>(Format::encode(x)); }
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
  static PYCOMM_HD Stored store(Acc x) { return x; }
};

// Ops: `scale` meets every input first, `fold` joins two, `finish` ends.

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

struct Op {
  template <typename Acc, typename Scalar>
  static PYCOMM_HD Acc scale(Acc x, Scalar) {
    return x;
  }
  template <typename Acc, typename Scalar>
  static PYCOMM_HD Acc finish(Acc x, Scalar) {
    return x;
  }
};

struct Sum : Op {
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

struct Prod : Op {
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

// A NaN on either side wins; written so that both compile to one compare and one blend.
struct Min : Op {
  template <typename Acc>
  static PYCOMM_HD Acc fold(Acc a, Acc b) {
    return ((b < a) | (b != b)) ? b : a;
  }
};

struct Max : Op {
  template <typename Acc>
  static PYCOMM_HD Acc fold(Acc a, Acc b) {
    return ((b > a) | (b != b)) ? b : a;
  }
};

struct Band : Op {
  template <typename Acc>
  static PYCOMM_HD Acc fold(Acc a, Acc b) {
    return a & b;
  }
};

struct Bor : Op {
  template <typename Acc>
  static PYCOMM_HD Acc fold(Acc a, Acc b) {
    return a | b;
  }
};

struct Bxor : Op {
  template <typename Acc>
  static PYCOMM_HD Acc fold(Acc a, Acc b) {
    return a ^ b;
  }
};

}  // namespace pycomm::kernels
