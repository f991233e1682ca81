// Arithmetic in which results are defined: rounding to nearest, ties to even, with denormal
// numbers, and without traps.
//
// A thread can be set to another arithmetic by torch.set_flush_denormal(True), fesetround(), or a
// library that was linked with -ffast-math. Ranks, and the threads of one rank, need not have the
// same settings, but must compute the same bits. So reductions and codecs set what they need on the
// thread that runs them and restore the previous settings.
#pragma once
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace pycomm {

/// Guard during which its thread computes with the defaults of IEEE 754. To be used where values
/// are computed, at the root of the call. It takes a few nanoseconds where nothing has to be set.
class DefaultArithmetic {
 public:
  DefaultArithmetic() : found_(read()) {
    if (differs(found_)) write(kDefault);
  }
  ~DefaultArithmetic() {
    if (differs(found_)) write(found_);
  }
  DefaultArithmetic(const DefaultArithmetic&) = delete;
  DefaultArithmetic& operator=(const DefaultArithmetic&) = delete;

 private:
  // Memory is a barrier to the compiler, and all values that it could move across are in memory.
#if defined(__x86_64__)
  using Word = uint32_t;
  static constexpr Word kDefault = 0x1f80;  // all traps masked
  static constexpr Word kFlags = 0x3f;      // flags of past exceptions; they change nothing
  static Word read() { return _mm_getcsr(); }
  static void write(Word word) {
    asm volatile("" ::: "memory");
    _mm_setcsr(word);
    asm volatile("" ::: "memory");
  }
  static bool differs(Word word) { return (word & ~kFlags) != kDefault; }
#else  // aarch64
  using Word = uint64_t;
  static constexpr Word kDefault = 0;
  static Word read() {
    Word word;
    asm volatile("mrs %0, fpcr" : "=r"(word)::"memory");
    return word;
  }
  static void write(Word word) { asm volatile("msr fpcr, %0" ::"r"(word) : "memory"); }
  static bool differs(Word word) { return word != kDefault; }
#endif

  const Word found_;
};

}  // namespace pycomm
