// AVX2 by name, for the few loops that the compiler does not vectorise well: functions with it can
// be compiled if this file defines PYCOMM_AVX2, and may run if has_avx2() returns true.
#pragma once
#include <string_view>

#include "core/simd.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(PYCOMM_NO_SIMD)
#define PYCOMM_AVX2 __attribute__((target("arch=x86-64-v3")))
#include <immintrin.h>

namespace pycomm::codecs {

// Asks the loader the same question as the PYCOMM_SIMD clones.
inline bool has_avx2() {
  static const bool has = std::string_view(simd_level()) != "default";
  return has;
}

}  // namespace pycomm::codecs
#endif
