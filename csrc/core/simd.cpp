#include "core/simd.h"

namespace pycomm {

namespace {

// Asks the loader the same question as every other clone.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(PYCOMM_NO_SIMD)
__attribute__((target("default"))) const char* level() { return "default"; }
__attribute__((target("arch=x86-64-v3"))) const char* level() { return "x86-64-v3"; }
__attribute__((target("arch=x86-64-v4"))) const char* level() { return "x86-64-v4"; }
#else
const char* level() { return "default"; }
#endif

}  // namespace

const char* simd_level() { return level(); }

}  // namespace pycomm
