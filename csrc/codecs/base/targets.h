// AVX2 and AVX-512 by name, for the few loops that the compiler does not vectorise well: functions
// with them can be compiled if this file defines PYCOMM_AVX2 and PYCOMM_AVX512, and may run if
// has_avx2() or has_avx512() returns true.
#pragma once
#include <string_view>

#include "core/simd.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(PYCOMM_NO_SIMD)
#define PYCOMM_AVX2 __attribute__((target("arch=x86-64-v3")))
#define PYCOMM_AVX512 __attribute__((target("arch=x86-64-v4")))
#include <immintrin.h>

namespace pycomm::codecs {

// These ask the loader the same question as the PYCOMM_SIMD clones.
inline bool has_avx512() {
  static const bool has = std::string_view(simd_level()) == "x86-64-v4";
  return has;
}
inline bool has_avx2() {
  static const bool has = std::string_view(simd_level()) != "default";
  return has;
}

}  // namespace pycomm::codecs
#endif
