// SIMD level: which of the PYCOMM_SIMD clones (core/types.h) this machine runs; for people and bug
// reports.
#pragma once
#include "core/types.h"

namespace pycomm {

/// Returns "x86-64-v4", "x86-64-v3" or "default".
PYCOMM_API const char* simd_level();

}  // namespace pycomm
